"""Bad input: a call with a value that some store cannot keep is refused as a whole, and changes nothing."""

from __future__ import annotations

from typing import Any

from taskharbor.drivers.contract import Ack, Extension, Fail, JobFilter, QueueSettings, Release, Retry
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LATEST, SECOND, Failure, UpdateFlags
from taskharbor_testkit.conformance.twin import BOOM, QUEUE, Twin

BAD_NAMES: tuple[Any, ...] = ("", " ", "\t\n", "x" * 201, "a\0b", "\ud800", 5, b"q")
BAD_FIELDS: tuple[tuple[str, Any], ...] = (
    *((field, name) for field in ("id", "type", "queue", "codec", "key") for name in BAD_NAMES),
    *(("idempotency_key", name) for name in BAD_NAMES),
    *((field, value) for field in ("run_at_us", "created_at_us") for value in (LATEST + 1, -LATEST - 1, 1.5)),
    *((field, value) for field in ("timeout_us", "backoff_min_us", "backoff_max_us") for value in (-1, "x")),
    *((field, value) for field in ("max_attempts", "max_stalls") for value in (-1, 1_000_001, True)),
    ("payload", "text"),
    ("payload", bytearray(b"{}")),
    ("payload", None),
    ("priority", 32_768),
    ("priority", 1.0),
    ("headers", {"a": 1}),
    ("headers", {"a": "\0"}),
    ("headers", {"a": "x" * 8_192}),
    ("headers", None),
    ("update", UpdateFlags(run_at="soon")),  # type: ignore[arg-type]
    ("update", {}),
)


async def _refused(t: Twin, method: str, *args: Any, **kwargs: Any) -> str:
    try:
        await getattr(t.driver, method)(*args, **kwargs)
    except InvalidRequest as error:
        return str(error)
    raise AssertionError(f"{method} takes {args} {kwargs}")


async def a_batch_with_a_bad_record_is_refused_and_none_of_it_is_stored(t: Twin) -> None:
    for field, value in BAD_FIELDS:
        told = await _refused(t, "enqueue", [t.job(), t.job(**{field: value})], now=t.now)
        assert field in told, told
    for other in (None, {"id": "a"}, "job"):
        await _refused(t, "enqueue", [t.job(), other], now=t.now)
    assert await t.driver.stats(now=t.now) == []
    await t.enqueue(t.job())


async def a_refusal_does_not_repeat_what_a_job_carries(t: Twin) -> None:
    told = await _refused(t, "enqueue", [t.job(payload="secret")], now=t.now)
    assert "secret" not in told


async def a_claim_with_bad_arguments_is_refused(t: Twin) -> None:
    await t.enqueue(t.job())
    good: dict[str, Any] = {"limit": 1, "lease_for": SECOND, "now": t.now, "worker": "w"}
    for field, value in (
        ("limit", -1),
        ("limit", 2**31),
        ("lease_for", 0),
        ("lease_for", LATEST + 1),
        ("now", LATEST + 1),
        ("now", 1.5),
        ("worker", ""),
        ("types", ["\0"]),
        ("types", [5]),
    ):
        assert field in await _refused(t, "reserve", QUEUE, **(good | {field: value}))
    for name in BAD_NAMES:
        assert "queue" in await _refused(t, "reserve", name, **good)


async def a_batch_with_a_bad_settlement_or_heartbeat_is_refused_and_none_of_it_is_applied(t: Twin) -> None:
    held = await t.lease(t.job())
    token = held.token or ""
    good = Ack(held.id, token)
    bad: tuple[Any, ...] = (
        "ack",
        Ack(held.id, token, b"x" * 1_048_577),
        Ack("", token),
        Ack("\0", token),
        Ack(held.id, 5),  # type: ignore[arg-type]
        Retry(held.id, token, LATEST + 1, 1, BOOM),
        Retry(held.id, token, None, 1, BOOM),  # type: ignore[arg-type]
        Retry(held.id, token, t.now, -1, BOOM),
        Fail(held.id, token, 1, None),  # type: ignore[arg-type]
        Fail(held.id, token, 1, Failure("x" * 70_000, "")),
        Fail(held.id, token, 1, Failure("E", "lone \ud800")),
        Fail(held.id, token, 1, Failure("E", "", "NUL \0")),
        Release(held.id, token, -LATEST - 1),
    )
    for settlement in bad:
        await _refused(t, "settle", [good, settlement], now=t.now)
    for extension in (Extension(held.id, token, "half"), Extension("", token), None):  # type: ignore[arg-type]
        beats = [Extension(held.id, token, b"1"), extension]
        await _refused(t, "extend_lease", beats, lease_for=SECOND, now=t.now)
    await _refused(t, "extend_lease", [Extension(held.id, token)], lease_for=0, now=t.now)
    assert (await t.get(held.id)).progress is None
    assert await t.settle(good) == [None]


async def bad_settings_are_refused_and_the_queue_keeps_its_own(t: Twin) -> None:
    for name in BAD_NAMES:
        await _refused(t, "configure", name, QueueSettings(), now=t.now)
        await _refused(t, "configure", QUEUE, QueueSettings(failure_queue=name), now=t.now)
    bad: tuple[Any, ...] = (
        QueueSettings(max_inflight=0),
        QueueSettings(max_inflight=-1),
        QueueSettings(max_inflight=2**31),
        QueueSettings(keep_done_us=-1),
        QueueSettings(keep_dead_us=LATEST + 1),
        QueueSettings(keep_attempts_us=1.5),  # type: ignore[arg-type]
        QueueSettings(paused=1),  # type: ignore[arg-type]
        QueueSettings(failure_queue=QUEUE),
        {},
    )
    for settings in bad:
        await _refused(t, "configure", QUEUE, settings, now=t.now)
    assert await t.driver.stats(now=t.now) == []


async def ids_and_names_that_no_job_has_are_refused_where_they_are_looked_for(t: Twin) -> None:
    """A call that only reads is refused for the same names as one that writes."""
    for name in BAD_NAMES:
        for method in ("get", "cancel", "requeue"):
            await _refused(t, method, ["known", name], now=t.now)
        await _refused(t, "job_attempts", name)
        await _refused(t, "settings", name)
        await _refused(t, "stats", now=t.now, queue=name)
        await _refused(t, "reclaim", now=t.now, queue=name)
        await _refused(t, "list_jobs", JobFilter(queue=name), now=t.now)
        await _refused(t, "list_jobs", JobFilter(types=frozenset({name})), now=t.now)
        await _refused(t, "purge", JobFilter(key=name))
    for limit in (0, -1, 2**31):
        await _refused(t, "list_jobs", JobFilter(), now=t.now, limit=limit)
        await _refused(t, "read_attempts", limit=limit)
    for limit in (-1, 2**31):
        await _refused(t, "reclaim", now=t.now, limit=limit)
        await _refused(t, "prune", now=t.now, limit=limit)
        await _refused(t, "purge", JobFilter(), limit=limit)
