"""A handler that never yields, in a process of its own: its timeout is a kill."""

from taskharbor import Harbor

harbor = Harbor("sqlite:///timeout.db")


@harbor.job(isolation="process", timeout=1, max_attempts=1)
def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    handle = spin.enqueue()
    harbor.worker(until_empty=True).run()
    record = handle.record()
    print(record.state, "-", (record.last_error or "").splitlines()[0])
    assert record.state == "dead"
