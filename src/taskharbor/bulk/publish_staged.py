"""Publishing: one recorded decision turns the staged blobs of a write into jobs, portion by portion.

The store's blob `writes` records the decisions. Once a write is decided, all its portions follow: by its publisher, by the
publisher's repetition, or by whoever publishes next. The store notes each portion together with its jobs
(`Driver.publish_blobs`), so a portion that is published again adds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from taskharbor.bulk import stage
from taskharbor.bulk.stage import BLOB_JOBS, SINGLE, StagedBlob, StagingLost, folder_of, series_of, wall_clock
from taskharbor.drivers.contract import DAY, Driver
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import SECOND, Micros

log = logging.getLogger("taskharbor.bulk")

RECORD: Final = "writes"
KEEP_SINGLE: Final[Micros] = 30 * DAY
"""The time that a single write is remembered. It is published again soon, if at all."""
KEEP_SERIES: Final[Micros] = 400 * DAY
"""The time that a series is remembered: a stream may pause for long."""
MOST_SINGLE: Final = 2_000
LEFT_BEHIND: Final[Micros] = 60 * SECOND
"""Others finish a decided write after this time. If its publisher still lives, nothing is done twice."""

R = TypeVar("R")


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """A decided write. Every publisher carries out the same portions in the same order."""

    write: str
    begun_at: Micros
    portions: list[list[StagedBlob]]


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """The latest finished write of a series, and the number of jobs that it added."""

    number: int
    added: int
    at: Micros

    def added_by(self, write: str) -> int:
        return self.added if self.number == series_of(write)[1] else 0


class Writes(msgspec.Struct, array_like=True):
    """The record of all decisions: writes that are being published, and series with their last published write."""

    plans: dict[str, Plan] = {}
    marks: dict[str, Mark] = {}

    def mark_of(self, write: str) -> Mark | None:
        """Return the mark if the write, or a later one of its series, is finished."""
        series, number = series_of(write)
        mark = self.marks.get(series)
        return mark if mark is not None and mark.number >= number else None

    def decide(self, plan: Plan) -> tuple[Mark | None, Plan | None]:
        """Record the plan, unless the write is over or another publisher has decided it."""
        mark = self.mark_of(plan.write)
        return mark, None if mark is not None else self.plans.setdefault(plan.write, plan)

    def close(self, write: str, added: int, now: Micros) -> Mark:
        self.plans.pop(write, None)
        mark = self.mark_of(write)
        if mark is None:
            series, number = series_of(write)
            self.marks.pop(series, None)
            mark = self.marks[series] = Mark(number, added, now)
            singles = [name for name, one in self.marks.items() if one.number == SINGLE]
            for name in singles[:-MOST_SINGLE]:
                del self.marks[name]
            self.marks = {
                name: one
                for name, one in self.marks.items()
                if now - one.at <= (KEEP_SINGLE if one.number == SINGLE else KEEP_SERIES)
            }
        return mark

    def abandon(self, write: str, now: Micros) -> Plan | None:
        """Forget a write that is not decided. Returns the plan if it is too late. A write of a series may be staged again, and
        then be published."""
        plan = self.plans.get(write)
        if plan is None and series_of(write)[1] == SINGLE:
            self.close(write, 0, now)
        return plan


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Writes).decode


async def _read(driver: Driver) -> tuple[Writes, bytes | None]:
    (data,) = await driver.read_blobs([RECORD])
    try:
        return Writes() if data is None else _decode(data), data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TaskHarborError(
            f"the record of bulk writes (blob {RECORD!r}) cannot be read: {error}. A client with the scope `bulk` has "
            "overwritten it: drop that blob, and repeat writes that were being published"
        ) from error


async def _look(driver: Driver) -> Writes:
    return (await _read(driver))[0]


async def _change(driver: Driver, step: Callable[[Writes], R]) -> R:
    """Change the record by compare-and-swap. Every step may be repeated: it finds its earlier effect."""
    while True:
        writes, before = await _read(driver)
        answer = step(writes)
        after = _encode(writes)
        if after == before or await driver.swap_blob(RECORD, after, expected=before):
            return answer
        await asyncio.sleep(random.random() * 0.02)


async def is_over(driver: Driver, write: str) -> bool:
    """True if the write was published or abandoned. Nothing that is staged for it is needed any more."""
    return (await _look(driver)).mark_of(write) is not None


async def publish(driver: Driver, write: str, tasks: Sequence[str], now: Micros) -> int:
    """Publish the jobs that these tasks staged, and drop the jobs of others. Returns the number of jobs that the write added, now
    or before."""
    await finish_left_behind(driver, now, except_for=write)
    writes = await _look(driver)
    mark, plan = writes.mark_of(write), writes.plans.get(write)
    if mark is None and plan is None:
        wanted = list(dict.fromkeys(tasks))
        ends = await stage.ends_of(driver, write, wanted)
        lost = [task for task in wanted if task not in ends]
        if lost and not await is_over(driver, write):
            raise StagingLost(
                f"what the tasks {', '.join(lost)} of {write} had staged is gone, or they never came to their end: nothing was "
                "published, write it again"
            )
        for queue, size in sum((Counter(end.sizes) for end in ends.values()), Counter[str]()).items():
            await driver.check_room(queue, size)
        blobs = [one for task in wanted if task in ends for one in ends[task].blobs]
        able = driver.capabilities
        portions = [blobs] if able.publishes_at_once and blobs else list(_portions(blobs, able.batch))
        made = Plan(write, wall_clock(), portions)
        mark, plan = await _change(driver, lambda writes: writes.decide(made))
    if plan is not None:
        return await _finish(driver, plan, now)
    assert mark is not None
    await stage.drop_staged(driver, write)
    return mark.added_by(write)


async def abandon(driver: Driver, write: str) -> None:
    """Drop the staged jobs of a write. A write that is decided already is published instead."""
    plan = await _change(driver, lambda writes: writes.abandon(write, wall_clock()))
    if plan is not None:
        await _finish(driver, plan, await driver.time())
    else:
        await stage.drop_staged(driver, write)


async def finish_left_behind(driver: Driver, now: Micros, *, except_for: str | None = None) -> None:
    """Finish writes whose publishers died after the decision."""
    latest = wall_clock() - LEFT_BEHIND
    with _only_warned():
        for plan in (await _look(driver)).plans.values():
            if plan.write != except_for and plan.begun_at <= latest:
                with _only_warned():
                    await _finish(driver, plan, now)


@contextlib.contextmanager
def _only_warned() -> Iterator[None]:
    """Log an error and go on. A write that cannot be finished, because its queue is full or its plan was forged, must not stop
    others."""
    try:
        yield
    except BackendUnavailable:
        raise
    except TaskHarborError as error:
        log.warning("a bulk write whose publisher died could not be finished: %s", error)


async def _finish(driver: Driver, plan: Plan, now: Micros) -> int:
    write = plan.write
    series, number = series_of(write)
    present = set(await driver.list_blobs(folder_of(write)))
    missing = [one for blobs in plan.portions for one in blobs if one.name not in present]
    if missing and (mark := (await _look(driver)).mark_of(write)) is not None:
        # Another publisher was faster, and has dropped the blobs.
        return mark.added_by(write)
    added: dict[str, int] = {}
    for portion, blobs in enumerate(plan.portions, 1):
        names = [one.name for one in blobs if one.name in present]
        added |= await driver.publish_blobs(names, series=series, number=number, portion=portion, now=now)
    total, at = sum(added.values()), wall_clock()
    was_over = await is_over(driver, write)
    closed, kept = await _change(driver, lambda writes: (writes.close(write, total, at), list(writes.plans)))
    await stage.drop_staged(driver, write)
    await stage.drop_abandoned(driver, kept, at)
    if missing and not was_over:
        raise TaskHarborError(
            f"{sum(one.jobs for one in missing)} jobs of {write} were lost after it was decided to publish them: somebody "
            f"removed what was staged; the other {total} are jobs now, so do not write all of them again"
        )
    return closed.added_by(write)


def _portions(blobs: Sequence[StagedBlob], most: int) -> Iterator[list[StagedBlob]]:
    """Yield the blobs of one transaction each: `most` at most, for a broker refuses more names in a call."""
    portion: list[StagedBlob] = []
    jobs = 0
    for one in blobs:
        if len(portion) >= most or (portion and jobs + one.jobs > BLOB_JOBS):
            yield portion
            portion, jobs = [], 0
        portion.append(one)
        jobs += one.jobs
    if portion:
        yield portion
