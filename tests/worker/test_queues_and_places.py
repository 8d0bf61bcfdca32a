"""What a worker takes next: turns, weights and strict order between queues, limits of queues, jobs of several places."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from taskharbor import Harbor, InvalidRequest, Job, JobRequest, JobState, Retry, Worker
from worker.stage import Gate, Stage, begun, eventually, finish, running


class Places:
    """Handlers that note the order of starts, and the most that ran at once."""

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        self.order: list[str] = []
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._sizes = sizes or {}

    async def on_loop(self, job: Job) -> None:
        size = self._sizes.get(job.type, 1)
        self.order.append(job.queue if not self._sizes else job.type)
        self.running.update({job.queue: size, "all": size})
        self.most |= self.running
        await asyncio.sleep(0)
        self.running.subtract({job.queue: size, "all": size})

    def register(self, worker: Worker) -> Worker:
        for type, size in self._sizes.items():
            worker.register(type, self.on_loop, size=size)
        return worker


# -- order between queues -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"concurrency": 1, "prefetch": 0}, {"concurrency": 4, "batch": 20}])
async def test_the_share_of_starts_follows_the_weights(here: Stage, options: dict[str, Any]) -> None:
    order: list[str] = []

    async def handler(job: Job) -> None:
        order.append(job.queue)
        if len(order) == 100:
            # Both at once. A queue that had nothing in its turns has not saved them up.
            queues = ["urgent"] * 500 + ["mail"] * 100
            await here.client.enqueue_many([JobRequest(type="work", queue=queue) for queue in queues])

    await here.enqueue_many(100, queue="urgent")
    await here.drain(handler, queues={"urgent": 5, "mail": 1}, **options)
    # A turn takes at most `batch` jobs.
    slack = options.get("batch", 1)
    for count in (60, 240, 480):
        assert abs(order[100 : 100 + count].count("mail") - count / 6) <= slack


@pytest.mark.parametrize("queues", [{"idle": 10, "urgent": 1, "mail": 1}, ["idle", "urgent", "mail"]])
async def test_the_unused_turns_of_a_queue_are_shared_by_the_others(here: Stage, queues: Any) -> None:
    order: list[str] = []

    async def handler(job: Job) -> None:
        order.append(job.queue)
        if len(order) % 20 == 0 and len(order) <= 200:
            # Less than its share, until it has enough for it.
            await here.enqueue_many(400 if len(order) == 200 else 1, queue="idle")

    for queue in ("urgent", "mail"):
        await here.enqueue_many(200, queue=queue)
    await here.drain(handler, queues=queues, concurrency=4, prefetch=0)
    assert abs(order[:200].count("mail") - order[:200].count("urgent")) <= 4
    share = 1 / 3 if isinstance(queues, list) else 10 / 12
    assert abs(order[200:320].count("idle") - 120 * share) <= 8


async def test_in_strict_order_a_queue_waits_for_those_before_it(here: Stage) -> None:
    order: list[str] = []

    async def handler(job: Job) -> None:
        order.append(job.queue)
        if order == ["urgent"] * 5 + ["mail"]:
            await here.enqueue(queue="urgent")

    await here.enqueue_many(3, queue="mail")
    await here.enqueue_many(5, queue="urgent")
    await here.drain(handler, queues=["urgent", "mail"], order="strict", concurrency=1, prefetch=0)
    assert order == ["urgent"] * 5 + ["mail", "urgent", "mail", "mail"]


# -- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"order": "strict"}, {"max_jobs": 60, "until_empty": False}])
async def test_a_limit_bounds_what_runs_of_a_queue_and_leaves_the_places_to_others(
    here: Stage, options: dict[str, Any]
) -> None:
    places = Places()
    await here.enqueue_many(30, queue="mail")
    await here.enqueue_many(30)
    # The poll interval is out of reach: room below a limit is heard of.
    limited = {"queues": ["mail", "default"], "limits": {"mail": 2}, "poll_interval": 3600.0}
    await here.drain(places.on_loop, concurrency=6, **limited, **options)
    assert len(places.order) == 60
    assert (places.most["mail"], places.most["all"]) == (2, 6)
    await here.enqueue_many(10)
    await here.drain(places.on_loop, limits={"default": 1}, poll_interval=3600.0)
    assert (len(places.order), places.most["mail"]) == (70, 2)


async def test_a_queue_at_its_limit_holds_up_no_other_and_does_not_keep_the_worker_busy(here: Stage) -> None:
    gate, looks = Gate(), 0
    await here.enqueue_many(5, queue="mail")
    worker = here.worker(gate.on_loop, queues=["mail", "default"], limits={"mail": 2}, poll_interval=3600.0)
    worker.register("quick", Places().on_loop)
    reserve = worker.driver.reserve

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return await reserve(*args, **options)

    worker.driver.reserve = counted  # type: ignore[method-assign]
    async with running(worker):
        await gate.began()
        for _ in range(20):
            job_id = await here.enqueue("quick")
            assert (await here.ended(job_id)).state is JobState.DONE
        assert worker.snapshot()["held"] == 2
        assert looks < 200
        gate.go_on.set()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"queues": {"a": 0}}, "weight 0 of queue 'a': give a whole number from 1"),
        ({"queues": {"a": True}}, "weight True of queue 'a'"),
        ({"queues": {"a": 1}, "order": "strict"}, "has weights"),
        ({"order": "strct"}, "order 'strct': give 'turns' or 'strict'"),
        ({"queues": ["a"], "limits": {"b": 1}}, "this worker serves"),
        ({"queues": ["a"], "limits": {"a": "2"}}, "limit '2' of queue 'a': give a whole number from 1"),
        ({"until_empty": "soon"}, "until_empty"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        Worker("memory://", **options)


# -- sizes ----------------------------------------------------------------------------------------------------------


async def test_a_job_takes_as_many_places_as_its_size(here: Stage) -> None:
    places = Places({"small": 1, "large": 3, "whole": 4})
    for _ in range(20):
        for type in ("small", "large", "small", "whole", "small"):
            await here.enqueue(type)
    await finish(places.register(here.worker(until_empty=True)).run_async())
    assert Counter(places.order) == {"small": 60, "large": 20, "whole": 20}
    assert places.most["all"] == 4


async def test_a_large_job_waits_for_its_places_and_nothing_overtakes_it(here: Stage) -> None:
    gate, order = Gate(), list[str]()

    async def handler(job: Job) -> None:
        order.append(job.type)

    worker = here.worker(gate.on_loop)
    worker.register("small", handler)
    worker.register("large", handler, size=4)
    await here.enqueue()
    task = await begun(worker, gate)
    large = await here.enqueue("large")
    await here.enqueue_many(10, "small")
    await here.until(large, lambda job: job.state is JobState.INFLIGHT)
    worker_held = worker.snapshot()["held"]
    gate.go_on.set()
    await eventually(lambda: len(order) == 11)
    worker.stop()
    await finish(task)
    assert (order, worker_held) == (["large"] + ["small"] * 10, 2)


async def test_large_jobs_are_not_hoarded_and_may_not_exceed_the_worker(here: Stage) -> None:
    gate = Gate()
    worker = here.worker()
    worker.register("work", gate.on_loop, size=2)
    await here.enqueue_many(10)
    async with running(worker):
        await eventually(lambda: worker.snapshot()["held"] == 2)
        await gate.began()
        assert worker.snapshot()["held"] == 2
        gate.go_on.set()
    harbor = Harbor("memory://")
    harbor.job(size=4)(_render)
    harbor.job(type="other")(_render)
    assert harbor.worker(concurrency=4).handlers["_render"].size == 4
    assert harbor.worker(concurrency=3, types=["other"]).handlers
    with pytest.raises(InvalidRequest, match="'_render' has the size 4, and this worker has 3 places"):
        harbor.worker(concurrency=3)
    for size in (0, True, "2"):
        with pytest.raises(InvalidRequest, match="from 1"):
            harbor.job(type="wrong", size=size)(_render)  # type: ignore[arg-type]


async def _render() -> None: ...


# -- until empty, with retries --------------------------------------------------------------------------------------


async def test_until_empty_can_wait_for_retries(here: Stage) -> None:
    async def handler(job: Job) -> None:
        if job.attempt == 1:
            raise Retry("once more", delay=0.05)

    ids = await here.enqueue_many(2)
    later = await here.enqueue(delay=3600)
    await here.drain(handler)
    assert [(await here.get(job_id)).attempts for job_id in ids] == [1, 1]
    ids.append(await here.enqueue())
    await here.drain(handler, until_empty="retries", poll_interval=0.01)
    assert [await here.state(job_id) for job_id in ids] == [JobState.DONE] * 3
    assert await here.state(later) is JobState.SCHEDULED
