"""Bad input: a call with a value that some store cannot keep is refused as a whole, and changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import DAY, Ack, Extension, Fail, JobFilter, QueueSettings, Release, RetryAt
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LARGEST_PAYLOAD, LATEST, MAX_TRIES, SECOND, Failure, UpdateFlags
from taskharbor_testkit.conformance.calls import perform
from taskharbor_testkit.conformance.twin import BOOM, QUEUE, START, Twin

BAD_NAMES: tuple[Any, ...] = ("", " ", "\t\n", "x" * 201, "a\0b", "\ud800", 5, b"q")
BAD_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("id", "type", "queue", "codec", "key", "idempotency_key"), BAD_NAMES),
    **dict.fromkeys(("run_at_us", "created_at_us"), (LATEST + 1, -LATEST - 1, 1.5)),
    **dict.fromkeys(("timeout_us", "backoff_min_us", "backoff_max_us"), (-1, "x")),
    **dict.fromkeys(("max_attempts", "max_stalls"), (-1, 1_000_001, True)),
    "payload": ("text", bytearray(b"{}"), None, b"x" * (LARGEST_PAYLOAD + 1)),
    "priority": (32_768, 1.0),
    "headers": ({"a": 1}, {"a": "\0"}, {"a": "x" * 8_192}, None),
    "update": (UpdateFlags(run_at="soon"), {}),  # type: ignore[arg-type]
}
BAD_CLAIMS: dict[str, tuple[Any, ...]] = {
    "queue": BAD_NAMES,
    "limit": (-1, 2**31),
    "lease_for": (0, DAY + 1),
    "now": (-1, LATEST + 1, 1.5),
    "worker": ("",),
    "types": (["\0"], [5]),
}
BAD_SETTINGS: dict[str, tuple[Any, ...]] = {
    "failure_queue": (*BAD_NAMES, QUEUE),
    "max_inflight": (0, -1, 2**31),
    "keep_done_us": (-1,),
    "keep_dead_us": (LATEST + 1,),
    "keep_attempts_us": (1.5,),
    "paused": (1,),
}


async def _refused(t: Twin, *calls: op.Operation[Any], names: str = "") -> None:
    """The driver refuses all of these calls, the error names the field, and nothing changes."""
    async with t.unchanged():
        tries = (perform(t.driver, call) for call in calls)
        raised = await asyncio.gather(*tries, return_exceptions=True)
    for call, error in zip(calls, raised, strict=True):
        assert isinstance(error, InvalidRequest), f"{call} is answered with {error!r}"
        assert names in str(error), error


async def a_batch_with_a_bad_record_is_refused_and_none_of_it_is_stored(t: Twin) -> None:
    for field, values in BAD_FIELDS.items():
        jobs = [t.job(**{field: value}) for value in values]
        await _refused(t, *[op.Enqueue([t.job(), job], t.now) for job in jobs], names=field)
    others: Any = (None, {"id": "a"}, "job")
    await _refused(t, *[op.Enqueue([t.job(), other], t.now) for other in others])


async def a_refusal_does_not_repeat_what_a_job_carries(t: Twin) -> None:
    (error,) = await asyncio.gather(
        t.driver.enqueue([t.job(payload="secret")], now=t.now), return_exceptions=True
    )
    assert "secret" not in str(error)


async def a_claim_with_bad_arguments_is_refused(t: Twin) -> None:
    await t.add()
    good: dict[str, Any] = {"queue": QUEUE, "limit": 1, "lease_for": SECOND, "now": t.now, "worker": "w"}
    for field, values in BAD_CLAIMS.items():
        await _refused(t, *[op.Reserve(**good | {field: value}) for value in values], names=field)


async def a_batch_with_a_bad_settlement_or_heartbeat_is_refused_and_none_of_it_is_applied(t: Twin) -> None:
    held = await t.lease(t.job())
    job_id, token = held.id, held.token or ""
    bad: tuple[Any, ...] = (
        None,
        "ack",
        Ack(job_id, token, b"x" * 1_048_577),
        Ack("", token),
        Ack("\0", token),
        Ack(job_id, 5),  # type: ignore[arg-type]
        RetryAt(job_id, token, LATEST + 1, 1, BOOM),
        RetryAt(job_id, token, None, 1, BOOM),  # type: ignore[arg-type]
        RetryAt(job_id, token, t.now, -1, BOOM),
        RetryAt(job_id, token, t.now, MAX_TRIES + 1, BOOM),
        Fail(job_id, token, MAX_TRIES + 1, BOOM),
        Fail(job_id, token, 1, None),  # type: ignore[arg-type]
        Fail(job_id, token, 1, Failure("x" * 70_000, "")),
        Fail(job_id, token, 1, Failure("E", "lone \ud800")),
        Fail(job_id, token, 1, Failure("E", "", "NUL \0")),
        Release(job_id, token, -LATEST - 1),
    )
    await _refused(t, *[op.Settle([Ack(job_id, token), one], t.now) for one in bad])
    good = Extension(job_id, token, b"1")
    beats: Any = (Extension(job_id, token, "half"), Extension("", token), None)  # type: ignore[arg-type]
    await _refused(t, *[op.ExtendLease([good, one], SECOND, t.now) for one in beats])
    for lease_for in (0, DAY + 1):
        await _refused(t, op.ExtendLease([good], lease_for, t.now), names="lease_for")


async def bad_settings_are_refused_and_the_queue_keeps_its_own(t: Twin) -> None:
    for field, values in BAD_SETTINGS.items():
        settings = [QueueSettings(**{field: value}) for value in values]
        await _refused(t, *[op.Configure(QUEUE, one, t.now) for one in settings])
    await _refused(t, *[op.Configure(name, QueueSettings(), t.now) for name in BAD_NAMES])
    await _refused(t, op.Configure(QUEUE, {}, t.now))  # type: ignore[arg-type]
    for fields in (["nope"], ["declaration"], [None], "paused"):
        await _refused(t, op.Configure(QUEUE, QueueSettings(), t.now, fields), names="fields")  # type: ignore[arg-type]
    await _refused(t, op.Configure(QUEUE, QueueSettings(), t.now, [], True), names="declares")
    await _refused(t, op.Configure(QUEUE, QueueSettings(declaration="NUL \0"), t.now, [], True))


async def ids_and_names_that_no_job_has_are_refused_where_they_are_looked_for(t: Twin) -> None:
    """A call that only reads is refused for the same names as one that writes."""
    for name in BAD_NAMES:
        await _refused(
            t,
            *[call(["known", name], START) for call in (op.Get, op.CancelJobs, op.Requeue)],
            *[op.JobAttempts(name), op.Settings(name), op.Stats(START, name), op.Reclaim(START, name)],
            op.ListJobs(JobFilter(queue=name), START),
            op.ListJobs(JobFilter(types=frozenset({name})), START),
            *[op.Purge(JobFilter(key=name)), op.CancelKeys([name], QUEUE, START)],
            op.CancelKeys(["k"], name, START),
        )
    for cursor in ("foo", "-1"):
        pages = (op.ListJobs(JobFilter(), START, 1, cursor), op.ListJobs(JobFilter(until=cursor), START))
        await _refused(t, *pages, op.ReadAttempts(cursor), names="cursor")
    for limit in (0, -1, 2**31):
        await _refused(t, op.ListJobs(JobFilter(), START, limit), op.ReadAttempts(None, limit))
    for limit in (-1, 2**31):
        calls = op.Reclaim(START, None, limit), op.Prune(START, limit), op.Purge(JobFilter(), limit)
        await _refused(t, *calls, names="limit")
