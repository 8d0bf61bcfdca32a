"""What cannot be done is kept: a dead letter, a job in the failure queue, and a way back."""

import msgspec

from taskharbor import Harbor, JobState, Unrecoverable
from taskharbor.drivers.contract import FAILURE_TYPE, FailurePayload

harbor = Harbor("sqlite:///failures.db")
harbor.queue("default", failure_queue="failed")
broken = True


@harbor.job
async def ship(order: int) -> str:
    if broken:
        raise Unrecoverable("the truck is broken")
    return f"order {order} shipped"


if __name__ == "__main__":
    handle = ship.enqueue(7)
    harbor.worker(until_empty=True).run()
    print("after the first run:", handle.state())

    (report,) = [job for job in harbor.client.list_jobs().jobs if job.type == FAILURE_TYPE]
    failure = msgspec.json.decode(report.payload, type=FailurePayload)
    print("the failure queue says:", failure.error, "- payload", failure.payload.decode())

    broken = False
    harbor.client.requeue(handle.id)
    harbor.worker(until_empty=True).run()
    print("after requeue:", handle.result())
    assert handle.state() is JobState.DONE
