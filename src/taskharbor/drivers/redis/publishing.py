"""Bulk writes: tasks stage jobs beside the queues they are meant for, and publishing moves them in.

Staged jobs lie in lists, one per task and queue, under the queue's own hash tag, so that a script can move them without sending
them again. Each list has a time to live: what dead writers left goes by itself.

A publication is decided in one step and then carried out queue by queue, in portions that a script handles without holding up
others for long. What is decided is written down, and whoever comes next finishes it: the one who tries again, the next bulk
write, or the upkeep of any worker. So a write is either all there in the end, once, or nothing of it ever was.
A write of up to `PORTION` jobs becomes visible at once: on one server in all its queues together, in a cluster in each of them.

Ids that the queue itself knows are not stored again. Whether another queue knows them is not looked at: writers make new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from taskharbor.drivers.redis.packing import Call, Word
from taskharbor.drivers.redis.scripts import script
from taskharbor.drivers.redis.staged_writes import COMPLETE, STAGED, Plan, Share, Staged, decode_plan
from taskharbor.drivers.redis.store import Store
from taskharbor.drivers.redis.stored import encode
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Micros

PORTION: Final = 10_000
"""Jobs that one step publishes."""
KEEP_STAGED: Final = 86_400
"""Seconds since the last sign of life of any task."""
KEEP_PUBLISHED: Final = 30 * 86_400
KEEP_SERIES: Final = 400 * 86_400
LEFT_BEHIND: Final = 60
"""Seconds after which others take it that a publisher died."""


class StagingIncomplete(Exception):
    """What some tasks staged is not there. Nothing was published."""

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__(", ".join(tasks))


class BulkWrite:
    """One write of one store: `number` of a series, or of its own, with a negative one."""

    def __init__(self, store: Store, write: str, series: str, number: int) -> None:
        self._store = store
        self.write = write
        self._series = series
        self._number = number
        control = control_prefix(store.prefix)
        self._mark = f"{control}written:{self._series}"
        self._record = f"{control}writing:{write}"
        self._publishing = f"{control}publishing"

    # -- staging ----------------------------------------------------------------------------------------------

    async def stage(self, task: str, values: dict[str, list[Word]], staged: dict[str, int]) -> bool:
        """Put down some of a task's jobs, four values each, by queue. `staged`: how many the task has put there so far.

        False: the write is over, and what the task brings is not wanted. Raises StagingIncomplete where earlier ones are gone.
        """
        fresh = [queue for queue in values if queue not in staged]
        # What is not written down first would be found by nobody.
        if fresh and not await self._announce(task, fresh):
            return False
        staged.update(dict.fromkeys(fresh, 0))
        put = script("bulk_stage")
        calls = [
            Call(put, (self._list(queue, task),), (4 * staged[queue], KEEP_STAGED, *some))
            for queue, some in values.items()
        ]
        if not all(await self._run_all(calls)):
            if not await self._announce(task, values):
                return False
            raise StagingIncomplete([task])
        for queue, some in values.items():
            staged[queue] += len(some) // 4
        return True

    async def _announce(self, task: str, queues: Iterable[str]) -> bool:
        return await self._enter([(STAGED + encode((task, queue)), b"") for queue in queues])

    async def complete(self, task: str, jobs: dict[str, int]) -> bool:
        """All of a task's jobs are there. False: the write is over."""
        return await self._enter([(COMPLETE + task.encode(), encode(jobs))])

    async def drop(self, task: str, queues: Iterable[str]) -> None:
        """What a task staged that is not wanted."""
        await self._unlink([self._list(queue, task) for queue in queues])

    async def _enter(self, fields: Sequence[tuple[bytes, bytes]]) -> bool:
        words = [word for field in fields for word in field]
        call = Call(script("bulk_enter"), (self._mark, self._record), (self._number, KEEP_STAGED, *words))
        return bool(await self._run(call))

    # -- publishing -------------------------------------------------------------------------------------------

    async def publish(self, tasks: Sequence[str], now: Micros) -> int:
        """How many jobs the write added, now or when it was published before. Raises StagingIncomplete."""
        while True:
            mark, plan = await self._look()
            if mark is not None:
                await self._forget()
                return self._told_by(mark)
            if plan is not None:
                return await self.finish(plan, now)
            try:
                made = await self._planned(list(dict.fromkeys(tasks)))
            except StagingIncomplete:
                # Perhaps because another has begun to publish it.
                if await self._look() == (None, None):
                    raise
                continue
            call = Call(
                script("bulk_decide"),
                (self._mark, self._publishing),
                (self._number, self.write, encode(made)),
            )
            over, held = await self._run(call)
            if over is None:
                return await self.finish(decode_plan(held), now)

    async def abandon(self, now: Micros) -> None:
        """Forget what was staged. What somebody has begun to publish is published."""
        is_over = int(self._number < 0)
        call = Call(
            script("bulk_abandon"),
            (self._mark, self._publishing),
            (self._number, self.write, is_over, KEEP_PUBLISHED),
        )
        plan = await self._run(call)
        if plan is not None:
            await self.finish(decode_plan(plan), now)
        else:
            await self._forget()

    async def finish(self, plan: Plan, now: Micros) -> int:
        """Carry out what was decided. Several may do so at once."""
        store = self._store
        shares = {share.queue: share for share in plan.shares}
        if shares:
            await store.register(shares)
        left = {queue: share.jobs for queue, share in shares.items()}
        taken: dict[str, int] = {}
        added: dict[str, int] = {}
        while left:
            calls: dict[str, Call] = {}
            room = PORTION
            for queue, jobs in left.items():
                if room <= 0:
                    break
                calls[queue] = self._step(shares[queue], now, min(room, jobs))
                room -= jobs
            step = list(calls.values())
            answers = await self._run_all(step)
            for queue, answer in zip(calls, answers, strict=True):
                taken[queue], added[queue], left[queue] = answer
                if not left[queue]:
                    del left[queue]
        jobs = sum(share.jobs for share in plan.shares)
        return await self._close(jobs - sum(taken.values()), sum(added.values()))

    def _step(self, share: Share, now: Micros, jobs: int) -> Call:
        call = self._store.call("bulk_publish", share.queue, now, jobs, KEEP_PUBLISHED)
        lists = [self._list(share.queue, task) for task in share.tasks]
        return call._replace(keys=(*call.keys, self._counter(share.queue), *lists))

    async def _close(self, lost: int, added: int) -> int:
        keep = KEEP_PUBLISHED if self._number < 0 else KEEP_SERIES
        call = Call(
            script("bulk_close"), (self._mark, self._publishing), (self._number, self.write, added, keep)
        )
        mark, is_own = await self._run(call)
        await self._forget()
        if lost > 0 and is_own:
            # In a cluster each node loses what it loses; on one server the plan goes with what it plans.
            raise TaskHarborError(
                f"{self._store.connections.options.place}: {lost} jobs of {self.write} were lost with a node after it "
                f"was decided to publish them; the other {added} are jobs now, so do not write all of them again"
            )
        return self._told_by(mark)

    async def _look(self) -> tuple[bytes | None, Plan | None]:
        """The mark, where the write is over; the plan, where it is being published."""
        mark, plan = await self._store.connections.commands(
            [("GET", self._mark), ("HGET", self._publishing, self.write)]
        )
        if mark is not None and _numbers_in(mark)[0] < self._number:
            mark = None
        return mark, None if plan is None else decode_plan(plan)

    def _told_by(self, mark: bytes) -> int:
        number, jobs = _numbers_in(mark)
        return jobs if number == self._number else 0

    async def _planned(self, tasks: Sequence[str]) -> Plan:
        staged = await self._staged()
        absent = [task for task in tasks if task not in staged.complete]
        if absent:
            raise StagingIncomplete(absent)
        expected = [(task, queue, jobs) for task in tasks for queue, jobs in staged.complete[task].items()]
        lists = [self._list(queue, task) for task, queue, _ in expected]
        commands: list[tuple[Word, ...]] = [("LLEN", name) for name in lists]
        # They are needed a little longer.
        commands += [("EXPIRE", name, KEEP_STAGED) for name in lists]
        found = await self._store.connections.commands(commands)
        broken = [
            task for (task, _, jobs), length in zip(expected, found, strict=False) if length != 4 * jobs
        ]
        if broken:
            raise StagingIncomplete(list(dict.fromkeys(broken)))
        shares: dict[str, Share] = {}
        for task, queue, jobs in expected:
            share = shares.setdefault(queue, Share(queue, [], 0))
            share.tasks.append(task)
            share.jobs += jobs
        begun_at = await _server_seconds(self._store)
        return Plan(begun_at, self._series, self._number, list(shares.values()))

    async def _staged(self) -> Staged:
        return Staged(await self._store.connections.command("HGETALL", self._record))

    async def _forget(self) -> None:
        """All that was staged, by whatever task. A list that a task is still adding to goes when that one comes to its end."""
        places = (await self._staged()).places
        counters = {self._counter(queue) for _, queue in places}
        await self._unlink([*(self._list(queue, task) for task, queue in places), *counters, self._record])

    async def _run(self, call: Call) -> Any:
        (answer,) = await self._run_all((call,))
        return answer

    async def _run_all(self, calls: Sequence[Call]) -> list[Any]:
        """All scripts of a write may be repeated as they are."""
        return await self._store.connections.run(lambda _: calls)

    async def _unlink(self, keys: Sequence[str]) -> None:
        await self._store.connections.commands([("UNLINK", key) for key in keys])

    def _list(self, queue: str, task: str) -> str:
        return self._store.keys(queue)[f"staged:{self.write}:{task}"]

    def _counter(self, queue: str) -> str:
        return self._store.keys(queue)[f"staged:{self.write}"]


def control_prefix(prefix: str) -> str:
    """Of the keys that belong to no queue. They share a slot, and no queue's keys are named like them."""
    return f"{prefix}{{taskharbor}}:"


async def finish_left_behind(store: Store, now: Micros) -> int:
    """Publications that somebody decided on and did not come to the end of. How many."""
    pairs = await store.connections.command("HGETALL", f"{control_prefix(store.prefix)}publishing")
    if not pairs:
        return 0
    latest = await _server_seconds(store) - LEFT_BEHIND
    finished = 0
    for write, packed in zip(pairs[::2], pairs[1::2], strict=True):
        plan = decode_plan(packed)
        if plan.begun_at <= latest:
            await BulkWrite(store, write.decode(), plan.series, plan.number).finish(plan, now)
            finished += 1
    return finished


async def _server_seconds(store: Store) -> int:
    return int((await store.connections.command("TIME"))[0])


def _numbers_in(mark: bytes) -> tuple[int, int]:
    number, _, jobs = mark.partition(b":")
    return int(number), int(jobs)
