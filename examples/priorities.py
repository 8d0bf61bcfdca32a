"""Higher priority first, first come first served within one, and nothing before its time."""

from taskharbor import Harbor

harbor = Harbor("sqlite:///priorities.db")
order: list[str] = []


@harbor.job
async def note(name: str) -> None:
    order.append(name)


if __name__ == "__main__":
    note.enqueue("first")
    note.enqueue("second")
    note.options(priority=10).enqueue("urgent")
    later = note.options(delay=3600).enqueue("tomorrow")
    harbor.worker(until_empty=True, concurrency=1).run()
    print(order, "and", later.state())
    assert order == ["urgent", "first", "second"]
