"""Handles: whatever one handle changes, each other one knows and obeys at once, and a confirmed change is written.

Each case first lets another handle read or do what it could remember, then changes it, then asks that handle again.
"""

from __future__ import annotations

from typing import Any

from taskharbor.drivers.contract import Driver, Enqueued
from taskharbor.jobs import SECOND, JobRecord, JobState
from taskharbor_testkit.conformance.case import parametrised
from taskharbor_testkit.conformance.snapshot import same_answer
from taskharbor_testkit.conformance.twin import QUEUE, SETTLEMENTS, Twin, ack, beat, fail


async def _reads_as_it_is(t: Twin, *handles: Driver) -> None:
    """Every way to read, on these handles, agrees with the model."""
    ids = list(t.model.jobs)
    for handle in handles:
        pairs: list[tuple[Any, Any]] = [
            (t.model.get(ids, now=t.now), await handle.get(ids, now=t.now)),
            (t.model.settings(QUEUE), await handle.settings(QUEUE)),
            (t.model.stats(now=t.now), await handle.stats(now=t.now)),
            *[(t.model.job_attempts(job_id), await handle.job_attempts(job_id)) for job_id in ids],
        ]
        wrong = [text for want, got in pairs if (text := same_answer(want, got))]
        assert not wrong, f"a handle reads what was: {wrong[0]}"


async def every_change_is_read_by_every_handle(t: Twin) -> None:
    """Each handle reads after each change, so one that remembers what it read is wrong after the next."""
    other = await t.store.connect()
    handles = (t.driver, other)
    for round_ in (1, 2):
        job = await t.add(key="k", run_at_us=t.now + SECOND)
        await _reads_as_it_is(t, *handles)
        await t.enqueue(t.job(key="k", payload=b"%d" % round_), by=other)
        await _reads_as_it_is(t, *handles)
        t.advance(1)
        for by, end in ((t.driver, SETTLEMENTS["retry"]), (other, SETTLEMENTS["release"]), (t.driver, fail)):
            (held,) = await t.reserve(by=other if by is t.driver else t.driver)
            await _reads_as_it_is(t, *handles)
            held = await t.keep(held, b"half")
            await _reads_as_it_is(t, *handles)
            await t.settle(end(held), by=by)
            await _reads_as_it_is(t, *handles)
        for _ in range(2):
            assert await t.requeue(job.id) == ["ready"]
            await _reads_as_it_is(t, *handles)
            assert await t.settle(fail(await t.lease())) == [None]
            await _reads_as_it_is(t, *handles)
        await t.requeue(job.id)
        await t.cancel(job.id)
        await _reads_as_it_is(t, *handles)
        await t.change(paused=round_ == 1, max_inflight=round_, declares=str(round_))
        await _reads_as_it_is(t, *handles)
        await t.change(paused=False)
        await _reads_as_it_is(t, *handles)


async def _claims(t: Twin, by: Driver) -> Any:
    await t.add()
    return len(await t.reserve(9, by=by))


async def _deaths(t: Twin, by: Driver) -> Any:
    (held,) = await t.reserve(1, by=by) if await t.enqueue(t.job(priority=9)) else []
    await t.settle(fail(held), by=by)
    return sum(job.queue != QUEUE for job in t.model.jobs.values())


async def _deaths_by_stall(t: Twin, by: Driver) -> Any:
    await t.lease(t.job(max_attempts=1, priority=9), lease=1)
    t.advance(1)
    await t.reclaim(by=by)
    return sum(job.queue != QUEUE for job in t.model.jobs.values())


async def _pruned(t: Twin, by: Driver) -> Any:
    for end in (ack, fail):
        await t.settle(end(await t.lease(t.job(priority=9))))
    t.advance(1)
    return await t.prune(by=by)


_DAY = 86_400 * SECOND


@parametrised
async def _obeyed(t: Twin, /, field: str, values: tuple[Any, ...], does: Any, *wanted: Any) -> None:
    """One handle sets a setting to each of these values in turn, and the other does something that depends on it."""
    other = await t.store.connect()
    await t.configure(keep_done_us=_DAY, keep_dead_us=_DAY, keep_attempts_us=_DAY)
    for value, expected in zip(values, wanted, strict=True):
        await t.change(**{field: value})
        assert await does(t, other) == expected, f"{field}={value} is not obeyed"


_obeyed("a_pause_is_obeyed_by_every_handle", "paused", (False, True, False, True), _claims, 1, 0, 2, 0)
_obeyed("a_limit_is_obeyed_by_every_handle", "max_inflight", (1, 3, 2, None), _claims, 1, 1, 0, 2)
_obeyed(
    "a_failure_queue_is_served_by_every_handle", "failure_queue", (None, "f", "g", None), _deaths, 0, 1, 2, 2
)
_obeyed(
    "a_failure_queue_is_served_by_every_handle_that_reclaims",
    "failure_queue",
    (None, "f", "g", None),
    _deaths_by_stall,
    *(0, 1, 2, 2),
)
_obeyed(
    "retention_of_done_jobs_is_obeyed_by_every_handle",
    "keep_done_us",
    (None, 0, None, 0),
    _pruned,
    0,
    2,
    0,
    2,
)
_obeyed(
    "retention_of_dead_jobs_is_obeyed_by_every_handle",
    "keep_dead_us",
    (None, 0, None, 0),
    _pruned,
    0,
    2,
    0,
    2,
)
_obeyed(
    "retention_of_the_log_is_obeyed_by_every_handle",
    "keep_attempts_us",
    (None, 0, None, 0),
    _pruned,
    0,
    4,
    0,
    4,
)


async def a_setting_that_another_handle_undid_is_set_again(t: Twin) -> None:
    """The handle that set it last, too; and a declaration that another one replaced is applied again."""
    other = await t.store.connect()
    for value in (True, False) * 2:
        for by in (t.driver, other)[:: 1 if value else -1]:
            await t.call(t.changing(paused=value, max_inflight=4), by)
        await t.call(t.changing(paused=not value), other)
        await t.call(t.changing(paused=value, max_inflight=4), t.driver)
        assert (await other.settings(QUEUE)).paused is value
    for text in ("one", "two") * 2:
        await t.call(t.changing(declares=text, max_inflight=len(text)), t.driver if text == "one" else other)
        assert (await other.settings(QUEUE)).declaration == text


async def what_another_handle_removed_is_accepted_anew(t: Twin) -> None:
    """Its id, its idempotency key and its key, by the handle that stored them first."""
    other = await t.store.connect()
    job = t.job(key="k", idempotency_key="i")
    for _ in range(2):
        await t.stores(job)
        await t.recognises(t.job(idempotency_key="i"), job)
        await t.cancel(job.id, by=other)
        assert await t.purge(by=other) == 1
    new = t.job(idempotency_key="i")
    assert await t.enqueue(new) == [Enqueued(new.id)]


async def a_heartbeat_is_written_however_little_it_changes(t: Twin) -> None:
    """A microsecond more, progress without more time, and the same progress again."""
    held = await t.lease(t.job(), lease=10)
    t.now += 1
    held = await t.keep(held, lease=10)
    await t.shows(held, expires_at_us=t.now + 10 * SECOND)
    for progress in (b"1", b"2", b"", b"2"):
        held = await t.keep(held, progress, lease=1)
        await t.shows(held, progress=progress, expires_at_us=t.now + 10 * SECOND)
        assert (await t.observer.get([held.id], now=t.now))[0] == await t.get(held.id)


async def every_job_of_a_batch_is_changed_not_the_first_alone(t: Twin) -> None:
    """Marked, extended, died and requeued twice, by a handle that did it before."""
    held = await t.hold(5)
    ids = [job.id for job in held]
    assert await t.cancel(*ids) == ["inflight"] * 5
    assert all(one.cancel_requested for one in await _found(t, ids))
    leases = await t.extend(*map(beat, held))
    assert all(getattr(lease, "cancel_requested", False) for lease in leases)
    held = await _found(t, ids)
    await t.settle(*map(fail, held))
    for _ in range(2):
        assert await t.requeue(*ids) == ["ready"] * 5
        assert await t.settle(*map(fail, await t.reserve(5))) == [None] * 5
        assert [job.state for job in await _found(t, ids)] == [JobState.DEAD] * 5


async def _found(t: Twin, ids: list[str]) -> list[JobRecord]:
    return [job for job in await t.observer.get(ids, now=t.now) if job is not None]


async def an_update_counts_whatever_it_brings(t: Twin) -> None:
    """An older record, an empty payload, no headers; the same values again."""
    await t.add(key="k", payload=b"first", headers={"a": "1"})
    for fields in ({"created_at_us": t.now - SECOND}, {"payload": b"", "headers": {}}, {"payload": b"first"}):
        given: dict[str, Any] = {"payload": b"new", "headers": {"b": "2"}, **fields}
        await t.enqueue(t.job(key="k", **given))
        (shown,) = t.model.jobs.values()
        assert (shown.payload, shown.headers) == (given["payload"], given["headers"])


async def a_purge_removes_what_it_counts_in_any_queue(t: Twin) -> None:
    """Paused, limited, with a failure queue and with retention for ever."""
    await t.add(queue="failed")
    held = await t.hold(3)
    await t.settle(ack(held[0]), fail(held[1]))
    await t.configure(
        paused=True, max_inflight=1, failure_queue="failed", keep_done_us=None, keep_dead_us=None
    )
    assert await t.purge(by=await t.store.connect()) == 2


async def a_blob_is_read_as_it_is_by_every_handle(t: Twin) -> None:
    """Replaced and swapped for one of the same length, and dropped."""
    other = await t.store.connect()
    for name, swaps in (("staging/a", False), ("writes", True)):
        for data in (b"one", b"two", b"one"):
            before = (await other.read_blobs([name]))[0]
            if swaps:
                assert await t.driver.swap_blob(name, data, expected=before)
            else:
                await t.driver.put_blob(name, data)
            assert await other.read_blobs([name]) == [data]
        await t.driver.drop_blobs([name])
        assert await other.read_blobs([name]) == [None]
        assert not await other.swap_blob(name, b"x", expected=b"one")
