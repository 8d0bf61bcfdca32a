"""Every lease that ended left a row: what happened, in order, resumable from a cursor."""

from taskharbor import Harbor, current_job

harbor = Harbor("sqlite:///history.db")


@harbor.job(max_attempts=3, backoff=(0, 0))
async def wobbly() -> None:
    if current_job().attempt < 3:
        raise ValueError("not yet")


if __name__ == "__main__":
    handle = wobbly.enqueue()
    harbor.worker(until_empty=True).run()
    handle.wait(timeout=10)
    page = harbor.client.read_attempts()
    for row in page.attempts:
        print(f"{row.seq} {row.type} fence={row.fence} {row.outcome:8} {row.error_type or ''}")
    assert [row.outcome for row in page.attempts] == ["retried", "retried", "done"]
    assert harbor.client.read_attempts(after=page.cursor).attempts == []
