"""How a handler says what should happen next, other than by failing."""

from taskharbor import Cancel, Harbor, Retry, Snooze, Unrecoverable, current_job

harbor = Harbor("sqlite:///signals.db")


@harbor.job(max_attempts=3)
async def visit(place: str) -> str:
    job = current_job()
    if place == "busy" and job.attempt == 1:
        raise Retry("come back at once", delay=0)
    if place == "closed":
        raise Unrecoverable("it will not open again")
    if place == "gone":
        raise Cancel("nobody needs this any more")
    if place == "early":
        raise Snooze(3600)
    return f"{place} on attempt {job.attempt}"


if __name__ == "__main__":
    handles = {place: visit.enqueue(place) for place in ("open", "busy", "closed", "gone", "early")}
    harbor.worker(until_empty=True).run()
    for place, handle in handles.items():
        record = handle.record()
        print(
            f"{place:7} {record.state:10} attempts={record.attempts} {(record.last_error or '').splitlines()[:1]}"
        )
