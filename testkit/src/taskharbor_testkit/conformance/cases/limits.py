"""W and pause: the effect of an operator's settings on claiming, at once and for every worker."""

from __future__ import annotations

from taskharbor.drivers.contract import DAY, QueueSettings
from taskharbor.drivers.operations import Configure
from taskharbor.jobs import JobState
from taskharbor_testkit.conformance.twin import SETTLEMENTS, Twin, ack


async def w_bounds_reserves_of_all_workers(t: Twin) -> None:
    """On every handle, those opened before W was set too."""
    other = await t.store.connect()
    await t.add_many(9)
    assert len(await t.reserve(1, by=other)) == 1
    await t.configure(max_inflight=4)
    assert len(await t.reserve(2, worker="w1")) == 2
    assert len(await t.reserve(2, worker="w2", by=other)) == 1
    assert await t.reserve(2, worker="w3", by=other) == []


async def every_end_frees_a_place(t: Twin) -> None:
    await t.configure(max_inflight=1)
    await t.add_many(6)
    for settlement in SETTLEMENTS.values():
        held = await t.lease()
        assert await t.reserve() == []
        await t.settle(settlement(held))
    assert len(await t.reserve(10)) == 1


async def an_expired_lease_frees_its_place_without_a_sweep(t: Twin) -> None:
    await t.configure(max_inflight=1)
    first = await t.lease(t.job(priority=1, max_attempts=1), lease=10)
    waiting = await t.add()
    t.advance(10)
    assert (await t.lease()).id == waiting.id
    await t.shows(first, state="dead")


async def an_extended_lease_keeps_its_place(t: Twin) -> None:
    await t.configure(max_inflight=1)
    held = await t.lease(t.job(), lease=10)
    await t.add()
    t.advance(9)
    held = await t.keep(held, lease=10)
    t.advance(9)
    assert await t.reserve() == []
    await t.settle(ack(held))
    assert len(await t.reserve(5)) == 1


async def w_and_pause_are_per_queue(t: Twin) -> None:
    await t.configure(max_inflight=1)
    await t.configure("paused", paused=True)
    for queue, granted in (("q", 1), ("free", 4), ("paused", 0)):
        await t.add_many(4, queue=queue)
        assert len(await t.reserve(10, queue=queue)) == granted


async def a_lower_w_revokes_no_lease(t: Twin) -> None:
    """It grants none until there is room."""
    await t.add_many(6)
    held = await t.reserve(4)
    await t.configure(max_inflight=2)
    assert (await t.stats()).counts[JobState.INFLIGHT] == 4
    assert await t.settle(ack(held[0]), ack(held[1])) == [None, None]
    assert await t.reserve(10) == []
    await t.settle(ack(held[2]))
    assert len(await t.reserve(10)) == 1


async def a_higher_w_grants_at_once(t: Twin) -> None:
    """And jobs of every type count."""
    await t.configure(max_inflight=1)
    await t.enqueue(*[t.job(type=kind) for kind in ("mail", "sms") * 3])
    assert len(await t.reserve(10, types=["mail"])) == 1
    assert await t.reserve(10, types=["sms"]) == []
    await t.configure(max_inflight=3)
    assert len(await t.reserve(10)) == 2
    await t.configure()
    assert len(await t.reserve(10)) == 3


async def a_paused_queue_grants_nothing(t: Twin) -> None:
    await t.add()
    await t.configure(paused=True)
    assert await t.reserve(10) == []
    await t.configure(paused=False)
    assert len(await t.reserve(10)) == 1


async def a_paused_queue_accepts_settles_and_reclaims(t: Twin) -> None:
    """Reserve on a paused queue leases nothing, but ends leases that are over."""
    over, held = await t.lease(t.job(), lease=5), await t.lease(t.job())
    await t.configure(paused=True)
    await t.add()
    t.advance(5)
    assert await t.reserve() == []
    await t.shows(over, state="ready")
    assert await t.settle(ack(await t.keep(held))) == [None]


async def settings_are_replaced_as_a_whole(t: Twin) -> None:
    """A queue that nobody configured has the default ones; the same settings again change nothing."""
    assert await t.driver.settings("q") == QueueSettings()
    kept = {"keep_done_us": 1, "keep_dead_us": None, "keep_attempts_us": 2 * DAY}
    full = QueueSettings(paused=True, max_inflight=4, failure_queue="f", **kept)
    for settings in (full, full, QueueSettings(max_inflight=1)):
        await t.call(Configure("q", settings, t.now))
        assert await (await t.store.connect()).settings("q") == settings
