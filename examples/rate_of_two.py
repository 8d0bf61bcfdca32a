"""W: however many workers there are, never more than two of these at once."""

import asyncio

from taskharbor import Harbor

harbor = Harbor("sqlite:///rate.db")
harbor.queue("api", max_inflight=2)
running, most = 0, 0


@harbor.job(queue="api")
async def call(n: int) -> None:
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0)
    running -= 1


if __name__ == "__main__":
    call.enqueue_many([(n,) for n in range(50)])
    harbor.worker(until_empty=True, concurrency=20).run()
    print("most at once:", most)
    assert most <= 2
