"""Common mistakes in Python: each message says what was wrong, with which value, and what to do."""

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import taskharbor
from taskharbor import Harbor, InvalidRequest, JobRequest
from taskharbor.testing import (
    assert_enqueued,
    drain,
    enqueued,
    inline,
    memory_store,
    refute_enqueued,
    run_inline,
)


class Shop:
    def method(self, order: int) -> None: ...


def stream(order: int) -> Iterator[int]:
    yield order


async def async_stream(order: int) -> AsyncIterator[int]:
    yield order


def plain(order: int) -> None: ...


# What the code of a row may name, beside `job`, `harbor` and `send`: a job with the parameters `to: str` and `copies: int`.
NAMES: dict[str, Any] = {
    **{name: getattr(taskharbor, name) for name in taskharbor.__all__},
    **{function.__name__: function for function in (assert_enqueued, drain, enqueued, inline, memory_store)},
    **{
        function.__name__: function for function in (refute_enqueued, run_inline, stream, async_stream, plain)
    },
    **{"Shop": Shop, "datetime": datetime, "timedelta": timedelta, "UTC": UTC, "functools": functools},
    **{"contextlib": contextlib, "pathlib": pathlib},
}
NEW_YEAR = "datetime(2030, 1, 1, tzinfo=UTC)"
MISTAKES = [
    # options of a declaration
    ("job(max_attempts=0)", "job 'send': max_attempts 0: at least 1"),
    ("job(max_attempts=-1)", "job 'send': max_attempts -1: at least 1.*leave it out for the default"),
    ("job(max_attempts='3')", "max_attempts '3': expected `int`, got `str`$"),
    ("job(retry=0)", "job 'send': max_attempts 0: at least 1"),
    ("job(timeout=-1)", "job 'send': timeout -1: longer than 0 seconds; 0 itself means no timeout"),
    ("job(timeout='5s')", "timeout '5s': give seconds or a timedelta"),
    ("job(priority='high')", "job 'send': priority 'high': expected `int`"),
    (
        "job(codec='pickle')",
        r"job 'send': unknown codec 'pickle' \(known: json, msgpack\): register it before",
    ),
    ("job(retry='x')", r"'send': retry='x': give the number of executions, as in retry=3"),
    ("job(retry=ExponentialBackoff)", "retry=<class.*or an object with next_delay"),
    ("job(backoff=5)", r"job 'send': backoff 5: give seconds as \(shortest, longest\)"),
    ("job(queue=['mail'])", r"queue \['mail'\].*give texts"),
    ("job(type='')", "type '': expected `str` of length >= 1"),
    ("job(isolation='fork')", "'send': isolation='fork': choose 'loop', 'thread' or 'process'"),
    ("job(on_invalid='retry')", "'send': on_invalid='retry': choose"),
    ("job(max_retries=3)", "unknown option max_retries for a job; known: queue, .*max_attempts"),
    ("job(delay=3)", r"delay for a job \(it is one of a call: job.options\("),
    # functions
    ("harbor.job('greet')", r"'greet' cannot be a job: write @harbor.job\(type='greet'\)"),
    ("harbor.batch_job('greet')", "'greet' cannot be a job"),
    ("harbor.job(5)", "5 cannot be a job: put @harbor.job on a function"),
    ("harbor.job(Shop)", "Shop'> cannot be a job: put @harbor.job on a function"),
    ("harbor.job(functools.partial(plain, 1))", "partial.* cannot be a job: put"),
    ("harbor.job(Shop.method)", "is a method, and a worker has no object.*: declare a function"),
    ("harbor.job(Shop().method)", "no object to call it on, so declare a function"),
    ("harbor.job(lambda: None)", "a lambda has no name, so write a function with def"),
    ("harbor.job(stream)", "'stream' is a generator function.*would never run: return a value"),
    ("harbor.job(async_stream)", "'async_stream' is a generator function"),
    ("Worker('memory://').register('s', stream)", "'s' is a generator function"),
    ("harbor.job(type='again')(send)", "<JobType send> cannot be a job: it is declared already"),
    # options of a call
    ("send.options(priority='high')", "job 'send': priority 'high': expected `int`"),
    ("send.options(max_attempts=0)", "job 'send': max_attempts 0: at least 1"),
    (f"send.options(delay=1, run_at={NEW_YEAR})", "delay 1 and run_at 2030.*: give one of them"),
    (f"send.options(delay={NEW_YEAR})", r"delay datetime.*an instant goes into run_at"),
    ("send.options(run_at=datetime(2030, 1, 1))", "has no time zone: use an aware datetime"),
    ("send.options(run_at='2030-01-01')", "run_at '2030-01-01': give an aware datetime"),
    ("send.options(delay=-5)", "delay -5 lies in the past: give 0 or more"),
    ("send.options(key='')", "job 'send': key '': expected"),
    ("send.options(key='k', update={'payload': True})", r"update {'payload': True}: give UpdateFlags\("),
    ("send.options(update=UpdateFlags()).enqueue('ada')", "give a key too"),
    ("send.options(headers=['a'])", r"headers \['a'\]: give a mapping"),
    ("send.options(retry=3)", r"retry for a call \(it is one of the declaration: @harbor.job"),
    ("send.options(countdown=3)", "unknown option countdown for a call; known: .*delay"),
    # calls
    ("send.enqueue()", r"send\(to: str.*missing a required argument: 'to'"),
    ("send.enqueue(5)", r"send\(\): the payload does not fit: Expected `str`, got `int` - at `\$.to`"),
    (
        "send.enqueue('ada', delay=5)",
        r"send.*unexpected keyword argument 'delay'; delay is an option.*options\(delay=",
    ),
    ("send.enqueue(object())", r"send\(\): cannot encode the payload as json: object has no JSON form"),
    ("send.delay('ada')", r"no attribute 'delay': enqueue it with .enqueue\(...\)"),
    ("send.enqueue_many(5)", "5 is not a list of calls: give one"),
    ("send.enqueue_many({'to': 'ada'})", "{'to': 'ada'} is not a list of calls"),
    ("send.enqueue_many(['ada'])", r"row 0: 'ada' is not a call: give a tuple.*\('ada',\)"),
    ("send.enqueue_many([('a',), ('b', 1, 2)])", "row 1: .*send.*too many positional arguments; nothing was"),
    ("send.enqueue_many([send.request('a')])", "row 0: .*give requests to harbor.enqueue_many"),
    ("harbor.enqueue_many([send])", "SyncJobType where a request belongs: give a JobRequest"),
    (
        "harbor.enqueue_many([send.request('a'), JobRequest(type='x', delay=-1)])",
        "row 1: delay -1.*nothing was",
    ),
    (
        "harbor.enqueue_many([send.request('a'), JobRequest(type='send', payload={})])",
        "row 1: job 'send': .*'to'",
    ),
    ("harbor.enqueue(send, {'to': 'ada'})", "<JobType send> is not a type: give the text"),
    ("harbor.enqueue('send', {'too': 'x'})", "missing a required argument: 'to'; it has no too"),
    ("harbor.enqueue('send', 'ada')", "payload of type str for the declared job 'send': give a mapping"),
    ("harbor.enqueue('send', to='ada')", "unknown option to for harbor.enqueue.*payload has the arguments"),
    ("harbor.client.enqueue(JobRequest(type='x', max_attempts=0))", "max_attempts 0: at least 1"),
    ("send.handle('nope').state()", "job nope: no job with this id"),
    (
        "harbor.client.list_jobs(JobFilter(states=['redy']))",
        "states 'redy': choose scheduled, ready, .*or cancelled",
    ),
    (
        "send.options(key='k', update=UpdateFlags(run_at='soon'))",
        "job 'send': run_at 'soon': choose yes, no, later or earlier",
    ),
    ("send.handle('nope').result(timeout='5s')", "timeout '5s': give seconds or a timedelta"),
    ("send.handle('nope').requeue(run_at='tomorrow')", "run_at 'tomorrow': give an aware datetime"),
    (
        "harbor.client.enqueue_many(700 * [JobRequest(type='x')] + [JobRequest(type='x', key='')])",
        r"key '': expected .*\(in records\[700\]\)",
    ),
    # apps
    ("Harbor('memory://', max_attempts=0)", r"Harbor\(\): max_attempts 0: at least 1"),
    ("Harbor('memory://', timeout=1e-9)", r"Harbor\(\): timeout 1e-09"),
    ("Harbor('memory://', backoff=5)", r"Harbor\(\): backoff 5"),
    ("Harbor('memory://', codec='pickle')", r"Harbor\(\): unknown codec 'pickle'"),
    ("Harbor('memory://', codecs=[JSON])", "codecs .*: give a CodecRegistry"),
    ("Harbor('memory://', queue=5)", r"Harbor\(\): queue 5: expected `str`"),
    ("Harbor('memory://', middleware=[5])", "middleware 5: give functions"),
    ("Harbor('memory://', max_result_bytes=-1)", "max_result_bytes=-1: from 0 to"),
    (
        "Harbor('memory://', lifespan=contextlib.nullcontext())",
        "lifespan .*: give the function.*do not call it",
    ),
    ("Harbor(pathlib.Path('jobs.db'))", r"store PosixPath\('jobs.db'\): give a URL"),
    ("Harbor('jobs.db')", "'jobs.db' is not a driver URL: write it like sqlite:///jobs.db"),
    ("harbor.worker(queues='mail')", "queues 'mail': expected a list"),
    ("harbor.worker(types=['sned'])", "the app declares no job 'sned': did you mean 'send'"),
    ("harbor.worker(lease='15s')", "lease '15s': give seconds or a timedelta"),
    ("harbor.worker(lease=None)", "lease None: give seconds or a timedelta"),
    ("harbor.worker(heartbeat='5s')", "heartbeat '5s': give seconds or a timedelta"),
    ("harbor.worker(grace='30s')", "grace '30s': give seconds or a timedelta"),
    ("harbor.worker(grace=-1)", "grace -1.0: expected `float` >= 0"),
    ("harbor.worker(until_empty='retry')", "until_empty 'retry': choose True, False or 'retries'"),
    ("harbor.client.configure('q', create=True, keep_done=-1)", "keep_done -1: 0 or more"),
    ("harbor.queue('mail', keep_dead=timedelta(days=-1))", "keep_dead .*days=-1.*: 0 or more"),
    ("Harbor('memory://').worker()", "declares no job.*import the modules"),
    # signals and policies
    ("Retry(30)", r"Retry\(30\): the reason is a text; for a time write Retry\(delay="),
    (f"Retry(delay=1, run_at={NEW_YEAR})", "Retry: delay 1 and run_at 2030.*: give one of them"),
    ("Retry(delay='30')", "Retry: delay '30': give seconds"),
    ("Snooze()", r"give a time, as in Snooze\(60\)"),
    (f"Snooze({NEW_YEAR})", "an instant goes into run_at"),
    ("Snooze(run_at='tomorrow')", "Snooze: run_at 'tomorrow': give an aware datetime"),
    ("FixedDelays(5)", r"FixedDelays\(5\): give a list of seconds"),
    ("FixedDelays([])", r"FixedDelays\(\[\]\): give a list of seconds, at least one"),
    ("ExponentialBackoff(factor=0.5)", "factor 0.5: at least 1"),
    ("current_job()", "works inside a handler only"),
    # tests
    ("assert_enqueued(plain)", "function plain.*: give a job that @harbor.job declared"),
    ("assert_enqueued(harbor, plain)", "function plain.*: give a job that @harbor.job declared"),
    ("refute_enqueued(send, to='ada')", "unknown expectation 'to'; known: args"),
    (
        "refute_enqueued(send, args={'X': 1})",
        "args {'X': 1}: send takes to, copies",
    ),
    ("refute_enqueued(harbor, 'send', args=('a', 1, 2))", r"args \('a', 1, 2\): send takes to, copies"),
    ("refute_enqueued(harbor, 'sned')", "the app declares no job 'sned': did you mean 'send'?"),
    ("assert_enqueued(harbor, 'sned', count=0)", "the app declares no job 'sned': did you mean 'send'?"),
    ("assert_enqueued(send, run_at=3)", "run_at 3: give an aware datetime"),
    ("drain(send)", "<JobType send> is not an app: give the Harbor itself"),
    ("drain(harbor, 'mail')", "queues 'mail': expected a list"),
    ("memory_store(send).__enter__()", "<JobType send> is not an app"),
    ("run_inline(plain, 1)", "function plain.*: give a job that @harbor.job declared"),
]


@pytest.mark.parametrize(("code", "words"), MISTAKES, ids=[code for code, _ in MISTAKES])
def test_a_mistake_is_explained(code: str, words: str) -> None:
    harbor = Harbor("memory://")

    @harbor.job
    def send(to: str, copies: int = 1) -> None: ...

    def job(**options: Any) -> object:
        return Harbor("memory://").job(**options)(send.function)

    with pytest.raises(
        (InvalidRequest, taskharbor.TaskHarborError, TypeError, AttributeError, RuntimeError)
    ) as said:
        eval(code, {**NAMES, "harbor": harbor, "send": send, "job": job})  # noqa: S307
    assert said.match(words)
    assert harbor.client.stats() == []
    if words.startswith(("job '", r"Harbor\(", "Retry", "Snooze", "delay 1")):  # One type for a wrong value.
        assert said.type is InvalidRequest


def test_a_duration_is_seconds_or_a_timedelta() -> None:
    harbor, short = Harbor("memory://"), timedelta(seconds=2)
    send = harbor.job(plain)
    options: Any = dict.fromkeys(("lease", "heartbeat", "poll_interval", "grace", "max_seconds"), short)
    config = harbor.worker(**{**options, "lease": 3 * short}).config
    assert (config.lease_us, config.heartbeat, config.poll_interval) == (6_000_000, 2.0, 2.0)
    assert (config.grace, config.max_seconds) == (2.0, 2.0)
    for wait in (send.enqueue(1).wait, send.enqueue(1).result):
        with pytest.raises(taskharbor.WaitTimeout, match=r"still ready after 0\.01 s"):
            wait(timeout=timedelta(seconds=0.01))


def test_what_looks_like_a_mistake_and_is_none() -> None:
    harbor = Harbor("memory://")
    named = harbor.job(type="named")(lambda to: to)
    assert named.options(max_attempts=None, delay=None).enqueue("a").record().max_attempts == 5
    flags = named.options(update=taskharbor.UpdateFlags(run_at="earlier"))
    assert flags.options(key="k").enqueue("a").record().key == "k"
    assert Harbor("memory://", max_attempts=7).enqueue("t").record().max_attempts == 7


def test_a_result_that_does_not_fit_the_annotation_is_told_from_a_payload() -> None:
    harbor = Harbor("memory://")

    @harbor.job
    def count() -> int:
        return "many"  # type: ignore[return-value]

    handle = count.enqueue()
    harbor.worker(until_empty=True).run()
    with pytest.raises(
        taskharbor.CodecError, match=r"\(count\) is done, and its result does not fit.*int.*got `str`"
    ):
        handle.result()
    with pytest.raises(taskharbor.CodecError, match="its result does not fit"):
        run_inline(count)


def test_a_progress_that_cannot_be_kept_does_not_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    harbor = Harbor("memory://")

    @harbor.job
    async def work() -> None:
        for value in (1, "x" * 5000, object()):
            taskharbor.current_job().progress(value)
        await asyncio.sleep(0)

    handle = work.enqueue()
    drain(harbor).raise_errors()
    assert handle.state() == "done"
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert (
        f"a progress of work {handle.id} is not kept: it has 5002 bytes, and at most 4096 are" in caplog.text
    )


def test_a_job_request_has_names_for_all_its_fields() -> None:
    """What `job.options` accepts, a request accepts too."""
    assert taskharbor.Options.__annotations__.keys() < set(JobRequest.__struct_fields__)
