"""A resource that remembers the highest fence it has seen refuses whoever comes with an older one."""

from taskharbor import Harbor, current_job

harbor = Harbor("sqlite:///fencing.db")


class Account:
    """Stands for a database row or a bucket that can compare a number."""

    def __init__(self) -> None:
        self.balance = 0
        self.fence = 0

    def write(self, balance: int, fence: int) -> bool:
        if fence < self.fence:
            return False
        self.balance, self.fence = balance, fence
        return True


account = Account()


@harbor.job(max_attempts=3, backoff=(0, 0))
async def set_balance(amount: int) -> int:
    job = current_job()
    assert account.write(amount, job.fence)
    if job.attempt == 1:
        raise RuntimeError("cut off after the write")
    return job.fence


if __name__ == "__main__":
    handle = set_balance.enqueue(100)
    harbor.worker(until_empty=True).run()
    print("written with fence", handle.result(timeout=10))
    print("a worker stuck since attempt 1 may write:", account.write(-1, fence=1))
    assert account.balance == 100
