"""Declare a job, enqueue it, run it, read its result."""

from taskharbor import Harbor

harbor = Harbor("sqlite:///first.db")


@harbor.job
async def add(a: int, b: int) -> int:
    return a + b


if __name__ == "__main__":
    handle = add.enqueue(20, 22)
    print("enqueued:", handle.state())
    harbor.worker(until_empty=True).run()
    print("result:", handle.result())
