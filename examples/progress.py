"""Progress goes up with the heartbeat; a cancel request comes down with it."""

import asyncio
import threading
import time

from taskharbor import Harbor, current_job

harbor = Harbor("sqlite:///progress.db")


@harbor.job
async def long_job() -> None:
    step = 0
    while True:
        step += 1
        current_job().progress({"step": step})
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    handle = long_job.enqueue()
    worker = harbor.worker(lease=1, until_empty=True)
    thread = threading.Thread(target=worker.run)
    thread.start()
    while (progress := handle.progress()) is None:
        time.sleep(0.05)
    print("seen from outside:", progress)
    handle.cancel()
    print("ended as:", handle.wait(timeout=30).state)
    thread.join()
