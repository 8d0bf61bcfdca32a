"""Failure handlers: which run for which job that died, what they are given, and that one does not depend on another."""

from typing import Any

import pytest

from taskharbor import (
    FailedJob,
    Harbor,
    InvalidRequest,
    Job,
    JobFilter,
    JobState,
    Unrecoverable,
)
from taskharbor.drivers.records import FAILURE_TYPE
from taskharbor.jobs import JobRequest
from worker.stage import finish


async def drain(harbor: Harbor, **options: Any) -> None:
    worker = harbor.worker(**{"until_empty": "retries", "poll_interval": 0.01, **options})
    await finish(worker.run_async())


async def in_queue(harbor: Harbor, queue: str) -> list[tuple[str, JobState]]:
    jobs = (await harbor.async_client().list_jobs(JobFilter(queue=queue))).jobs
    return sorted((job.type.removeprefix(FAILURE_TYPE), job.state) for job in jobs)


async def test_handlers_of_the_app_of_a_queue_and_of_a_job_run_for_what_is_theirs() -> None:
    harbor, seen = Harbor("memory://"), list[tuple[str, FailedJob]]()

    @harbor.job(queue="mail", max_attempts=2, backoff=(0, 0))
    async def send(to: str) -> None:
        raise ValueError(f"no route to {to}")

    @harbor.job
    def ship(order: int) -> None:
        raise Unrecoverable("no truck")

    @harbor.on_failure
    async def of_app(failed: FailedJob) -> None:
        seen.append(("app", failed))

    @harbor.on_failure(queue="mail", retry=3)
    def of_queue(failed: FailedJob) -> None:
        seen.append(("queue", failed))

    @ship.on_failure(timeout=5)
    @harbor.on_failure(job="send", type="of send")
    def of_job(failed: FailedJob) -> None:
        seen.append(("job", failed))

    async with harbor:
        sent = await send.options(headers={"trace": "7"}).enqueue_async("Ada")
        shipped = await ship.enqueue_async(3)
        await drain(harbor)
    by = {(who, failed.id): failed for who, failed in seen}
    assert len(seen) == len(by) == 5
    assert by.keys() == {
        *((who, sent.id) for who in ("app", "queue", "job")),
        *((who, shipped.id) for who in ("app", "job")),
    }
    failed = by["queue", sent.id]
    assert (failed.type, failed.queue, failed.payload) == ("send", "mail", {"to": "Ada"})
    assert (failed.attempts, failed.stalls, failed.key, failed.headers) == (2, 0, None, {"trace": "7"})
    assert failed.error.startswith("ValueError: no route to Ada\n")
    assert by["app", shipped.id].payload == {"order": 3}


async def test_a_failure_handler_that_fails_keeps_no_other_from_running_and_leads_to_no_loop() -> None:
    harbor, calls = Harbor("memory://", max_attempts=1), list[str]()

    @harbor.job
    async def ship(blob: str) -> None:
        raise ValueError

    @harbor.on_failure(max_attempts=3, backoff=(0, 0))
    async def broken(failed: FailedJob) -> None:
        calls.append("broken")
        raise ValueError

    @harbor.on_failure
    async def alert(failed: FailedJob) -> None:
        calls.append("alert")

    async with harbor:
        # The copy of a payload may be longer than what is accepted from a caller.
        await ship.enqueue_async("x" * 1_000_000)
        await drain(harbor)
        assert sorted(calls) == ["alert", "broken", "broken", "broken"]
        expected = [("", JobState.DONE), (".alert", JobState.DONE), (".broken", JobState.DEAD)]
        assert await in_queue(harbor, "default.failed") == expected
        assert {stats.queue for stats in await harbor.async_client().stats()} == {"default", "default.failed"}
        # Neither the app's limit nor crashes of workers keep a handler from running.
        jobs = (await harbor.async_client().list_jobs(JobFilter(queue="default.failed"))).jobs
        limits = {job.type.removeprefix(FAILURE_TYPE): (job.max_attempts, job.max_stalls) for job in jobs}
        assert limits == {"": (100, 0), ".alert": (5, 100), ".broken": (3, 100)}
        # A worker that died between the two writes: the second run adds nothing.
        notice = (await harbor.async_client().list_jobs(JobFilter(types=frozenset({FAILURE_TYPE})))).jobs[0]
        await harbor.handlers[FAILURE_TYPE].function(Job(notice, 0))
        assert await in_queue(harbor, "default.failed") == expected


async def test_a_failed_job_can_be_enqueued_again_once_whatever_becomes_of_its_handler() -> None:
    harbor, seen = Harbor("memory://", max_attempts=1), list[FailedJob]()

    @harbor.job(priority=4)
    async def ship(order: int) -> None:
        raise ValueError

    @harbor.on_failure(max_attempts=2, backoff=(0, 0))
    async def again(failed: FailedJob) -> None:
        seen.append(failed)
        await failed.enqueue_again_async(delay=3600)
        if len(seen) == 1:
            raise ValueError("after the enqueue")

    async with harbor:
        await ship.options(key="k", headers={"a": "b"}).enqueue_async(3)
        client = harbor.async_client()
        # Written by another release: a field that this one does not know, and a codec.
        newer = {
            "job_id": "1",
            "queue": "other",
            "type": "gone",
            "codec": "proto",
            "payload": "AAE=",
            "error": "e",
        }
        notice = {**newer, "attempts": 1, "stalls": 2, "key": "k2", "since": "tomorrow"}
        await client.enqueue(JobRequest(type=FAILURE_TYPE, queue="default.failed", payload=notice))
        await drain(harbor)
        scheduled = JobFilter(states=frozenset({JobState.SCHEDULED}))
        waiting = sorted((await client.list_jobs(scheduled)).jobs, key=lambda job: job.type)
    gone, ship_again = waiting
    assert (len(seen), gone.type, ship_again.type) == (3, "gone", "ship")
    assert (ship_again.payload, ship_again.priority, ship_again.headers) == (b'{"order":3}', 4, {"a": "b"})
    assert (gone.queue, gone.key, gone.codec, gone.payload) == ("other", "k2", "proto", b"\0\1")
    unread = next(failed for failed in seen if failed.type == "gone")
    assert (unread.payload, unread.key, unread.stalls) == (b"\0\1", "k2", 2)
    with pytest.raises(RuntimeError, match="belongs to no app"):
        FailedJob(id="1", type="t", queue="q", payload={}, error="").enqueue_again()


def test_a_worker_serves_the_failure_queues_of_its_queues() -> None:
    harbor = Harbor("memory://")
    harbor.job(queue="mail")(_ship)
    assert harbor.worker().config.queues == ("default", "mail")
    harbor.declared_queues["mail"] = {"failure_queue": "bad mail"}
    harbor.declared_queues["default"] = {"failure_queue": None}
    harbor.on_failure(_ignore)
    assert harbor.worker().config.queues == ("default", "mail", "bad mail")
    types = (_ship.__name__, FAILURE_TYPE, f"{FAILURE_TYPE}._ignore")
    assert harbor.worker(types=[_ship.__name__]).config.types == types
    one = harbor.worker(queues={"x": 5, "mail": 2, "bad mail": 1})
    assert one.config.weights == {"x": 5, "x.failed": 5, "mail": 2, "bad mail": 1}
    assert harbor.worker(queues=["x", "x.failed"], order="strict").config.queues == ("x", "x.failed")
    assert harbor.declared_queues == {
        "mail": {"failure_queue": "bad mail"},
        "default": {"failure_queue": None},
        "x": {"failure_queue": "x.failed"},
    }


async def _ship() -> None: ...


def _ignore(failed: FailedJob) -> None: ...


def test_a_failure_handler_of_an_unknown_queue_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    harbor = Harbor("memory://")
    harbor.job(queue="mail")(_ship)
    harbor.on_failure(queue="mail")(_ignore)
    harbor.worker()
    assert caplog.text == ""
    harbor.on_failure(queue="mial", type="typo")(_ignore)
    harbor.worker()
    assert "no job of the app is in queue mial; the app has default, mail" in caplog.text


def test_a_failure_handler_that_cannot_work_is_refused() -> None:
    harbor = Harbor("memory://")
    wrong: Any = harbor.on_failure
    with pytest.raises(InvalidRequest, match="takes one argument"):
        wrong(lambda: None)
    with pytest.raises(TypeError, match="unknown option isolation"):
        wrong(isolation="process")(_ignore)
    for options in ({"timeout": -1}, {"priority": "high"}, {"type": "x" * 190}, {"retry": "x"}):
        with pytest.raises(InvalidRequest):
            wrong(**options)(_ignore)
    assert not harbor.handlers
    harbor.on_failure(_ignore)
    with pytest.raises(InvalidRequest, match="declared already"):
        harbor.on_failure(_ignore)
    by_hand = Harbor("memory://")
    by_hand.job(type=FAILURE_TYPE)(_ship)
    with pytest.raises(InvalidRequest, match="declared already"):
        by_hand.on_failure(_ignore)
