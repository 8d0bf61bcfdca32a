"""Settings: they change by field, and take effect on claiming at once and for every worker."""

from __future__ import annotations

from typing import get_args

import msgspec

from taskharbor.drivers.contract import DAY, QueueSettings, SettingsField
from taskharbor.drivers.operations import Configure
from taskharbor.jobs import JobState
from taskharbor_testkit.conformance.twin import SETTLEMENTS, Twin, ack

FULL = QueueSettings(
    paused=True,
    max_inflight=4,
    failure_queue="f",
    keep_done_us=1,
    keep_dead_us=None,
    keep_attempts_us=2 * DAY,
)


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
    for settings in (FULL, FULL, QueueSettings(max_inflight=1)):
        await t.call(Configure("q", settings, t.now))
        assert await (await t.store.connect()).settings("q") == settings


async def a_setting_changes_by_itself(t: Twin) -> None:
    """Each field in turn, to another value and back to its default; the others keep theirs. No field: nothing changes."""
    await t.call(Configure("q", FULL, t.now))
    for field in get_args(SettingsField):
        for settings in (QueueSettings(), FULL):
            await t.change(**{field: getattr(settings, field)})
            wanted = msgspec.structs.replace(FULL, **{field: getattr(settings, field)})
            assert await (await t.store.connect()).settings("q") == wanted
    async with t.unchanged():
        await t.change()


async def a_queue_is_known_from_its_first_setting(t: Twin) -> None:
    """Also if none of its fields was named. The fields that were not named have their defaults."""
    await t.change("new", max_inflight=2)
    await t.change("named")
    shown = {stats.queue: stats.settings for stats in await t.driver.stats(now=t.now)}
    assert shown == {"named": QueueSettings(), "new": QueueSettings(max_inflight=2)}


async def pause_and_limit_at_the_same_time_both_hold(t: Twin) -> None:
    """Two handles, 40 times in a row. Each changes its own field, and none undoes the other's."""
    other = await t.store.connect()
    for n in range(40):
        calls = t.changing(paused=n % 2 == 0), t.changing(max_inflight=n + 1)
        await t.together((t.driver, calls[0]), (other, calls[1]))
        assert await t.driver.settings("q") == QueueSettings(paused=n % 2 == 0, max_inflight=n + 1)


async def a_field_that_changes_takes_effect_at_once(t: Twin) -> None:
    await t.add_many(3)
    await t.change(max_inflight=1)
    assert len(await t.reserve(3)) == 1
    await t.change(paused=True)
    await t.change(max_inflight=3)
    assert await t.reserve(3) == []
    await t.change(paused=False)
    assert len(await t.reserve(3)) == 2


# -- declarations ----------------------------------------------------------------------------------------------


async def a_declaration_is_applied_once(t: Twin) -> None:
    """The same one again does not undo what an operator changed since. Another one is applied, to its fields only."""
    await t.change(declares="one", max_inflight=2, keep_done_us=1)
    await t.change(max_inflight=9, failure_queue="f")
    changed = QueueSettings(max_inflight=9, keep_done_us=1, failure_queue="f", declaration="one")
    assert await t.driver.settings("q") == changed
    async with t.unchanged():
        await t.change(declares="one", max_inflight=2, keep_done_us=1)
    await t.change(declares="zwölf", max_inflight=3)
    wanted = msgspec.structs.replace(changed, max_inflight=3, declaration="zwölf")
    assert await (await t.store.connect()).settings("q") == wanted


async def a_declaration_may_name_no_field(t: Twin) -> None:
    """It is noted all the same, and the queue is known. With all fields, all change."""
    await t.change(declares="nothing")
    assert await t.driver.settings("q") == QueueSettings(declaration="nothing")
    declared = msgspec.structs.replace(FULL, declaration="all")
    await t.call(Configure("q", declared, t.now, None, True))
    assert await t.driver.settings("q") == declared


async def only_a_declaration_changes_the_declaration(t: Twin) -> None:
    """An operator's change leaves it, even one of all fields that names another."""
    await t.change(declares="one")
    for text in (None, "other"):
        await t.call(Configure("q", QueueSettings(paused=True, declaration=text), t.now))
        assert await t.driver.settings("q") == QueueSettings(paused=True, declaration="one")


async def declarations_are_per_queue(t: Twin) -> None:
    await t.change(declares="one", max_inflight=1)
    await t.change("other", declares="one", max_inflight=2)
    assert (await t.driver.settings("other")).max_inflight == 2


async def two_that_declare_at_once_and_an_operator(t: Twin) -> None:
    """Two processes that start side by side declare the same; the operator's field is another, and holds."""
    one, two = await t.store.connect(), await t.store.connect()
    for n in range(10):
        declaring = t.changing(declares=str(n), max_inflight=n + 1)
        await t.together((t.driver, declaring), (one, declaring), (two, t.changing(paused=n % 2 == 0)))
        wanted = QueueSettings(paused=n % 2 == 0, max_inflight=n + 1, declaration=str(n))
        assert await t.driver.settings("q") == wanted
