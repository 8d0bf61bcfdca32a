"""From how an execution ended to what is written for it. Through a whole worker: tests/worker/test_outcomes.py."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import taskharbor.signals as signals
from records import NOW, make_record
from taskharbor import CodecError, FixedDelays, InvalidRequest, JobRecord, PayloadInvalid, RemoteError
from taskharbor.codec import JSON, CodecRegistry, NotKept, decode_result
from taskharbor.drivers.contract import Ack, Discard, Fail, Release, RetryAt, Settlement
from taskharbor.handlers import Handler
from taskharbor.jobs import LATEST, MAX_ERROR_CHARS, MAX_RESULT_BYTES, SECOND, Failure, to_micros
from taskharbor.middleware import PayloadRejected, Raised
from taskharbor.worker.decide import decide, describe


def record(**fields: Any) -> JobRecord:
    return make_record("j", **{"type": "t", "token": "k", "expires_at_us": NOW, **fields})


async def nothing(job: Any) -> None: ...


def decided(outcome: Any, *, job: JobRecord | None = None, **handler: Any) -> Settlement:
    return decide(job or record(), Handler("t", nothing, **handler), outcome, CodecRegistry(), NOW)


def retried(outcome: Any, **options: Any) -> RetryAt:
    settled = decided(outcome, **options)
    assert isinstance(settled, RetryAt)
    return settled


AT = datetime(2030, 1, 1, tzinfo=UTC)
INVALID = Raised(PayloadRejected(PayloadInvalid("Expected `int`")))
UNKNOWN = Raised(PayloadRejected(CodecError("unknown codec 'x'")))


def raised(error: BaseException) -> Raised:
    try:
        raise error
    except BaseException as caught:
        return Raised(caught)


@pytest.mark.parametrize(
    ("outcome", "expected", "options"),
    [
        (None, Ack("j", "k", None), {}),
        ({"n": 1}, Ack("j", "k", b'{"n":1}'), {}),
        ([1], Ack("j", "k", b"\x91\x01"), {"job": record(codec="msgpack")}),
        ("x" * (MAX_RESULT_BYTES - 2), Ack("j", "k", b'"' + b"x" * (MAX_RESULT_BYTES - 2) + b'"'), {}),
        (Raised(signals.Snooze(4)), Release("j", "k", NOW + 4 * SECOND), {}),
        (Raised(signals.Snooze(1e15)), Release("j", "k", LATEST), {}),
        (Raised(signals.Snooze(run_at=datetime.min.replace(tzinfo=UTC))), Release("j", "k", -LATEST), {}),
        (Raised(signals.Snooze(run_at=AT)), Release("j", "k", to_micros(AT)), {}),
        (Raised(signals.Cancel("stale")), Discard("j", "k", Failure("Cancel", "stale")), {}),
        (Raised(signals.Unrecoverable("gone")), Fail("j", "k", 1, Failure("Unrecoverable", "gone")), {}),
        # An invalid payload is dead or completed, and no attempt. What has an unknown codec is never completed.
        (INVALID, Fail("j", "k", 0, Failure("PayloadInvalid", "Expected `int`")), {}),
        (INVALID, Ack("j", "k"), {"on_invalid": "complete"}),
        (UNKNOWN, Fail("j", "k", 0, Failure("CodecError", "unknown codec 'x'")), {}),
        (UNKNOWN, Fail("j", "k", 0, Failure("CodecError", "unknown codec 'x'")), {"on_invalid": "complete"}),
    ],
)
def test_what_is_written(outcome: Any, expected: Settlement, options: dict[str, Any]) -> None:
    assert decided(outcome, **options) == expected


class Treacherous:
    def model_dump(self, mode: str) -> Any:
        raise KeyError("a model whose dump fails in its own way")


@pytest.mark.parametrize(
    "result",
    [object(), "x" * MAX_RESULT_BYTES, {1, object()}, Treacherous()],
    ids=["no JSON form", "too large", "inner part", "failing model"],
)
def test_a_result_that_cannot_be_kept_is_no_failure(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    settled = decided(result)
    assert isinstance(settled, Ack)
    assert isinstance(decode_result(JSON, settled.result), NotKept)
    assert "is not kept" in caplog.text


def test_a_coroutine_is_no_result_but_work_not_done() -> None:
    settled = retried(nothing(None))
    assert settled.error.type == "NotAwaited"
    assert "async def" in settled.error.message


def test_a_failure_is_retried_by_the_policy_until_attempts_are_spent_and_stalls_count() -> None:
    error = raised(ValueError("no"))
    first = retried(error, retry=FixedDelays([3, 7]))
    assert (first.run_at_us, first.attempts) == (NOW + 3 * SECOND, 1)
    second = retried(error, job=record(attempts=1), retry=FixedDelays([3, 7]))
    assert (second.run_at_us, second.attempts) == (NOW + 7 * SECOND, 2)
    last = decided(error, job=record(attempts=2, max_attempts=3))
    assert isinstance(last, Fail)
    assert last.attempts == 3
    retried(error, job=record(stalls=1, max_attempts=3))
    assert isinstance(decided(error, job=record(stalls=2, max_attempts=3)), Fail)
    # With a bound of their own, stalls spend no attempt.
    retried(error, job=record(stalls=2, max_attempts=2, max_stalls=9))
    assert isinstance(decided(error, job=record(attempts=1, max_attempts=2, max_stalls=9)), Fail)


class Broken:
    def next_delay(self, job: JobRecord, attempt: int, error: BaseException) -> float:
        raise LookupError("no idea")


class Loose:
    def __init__(self, delay: Any) -> None:
        self.delay = delay
        self.asked: tuple[str, int, BaseException] | None = None

    def next_delay(self, job: JobRecord, attempt: int, error: BaseException) -> Any:
        self.asked = (job.id, attempt, error)
        return self.delay


@pytest.mark.parametrize("policy", [None, Broken(), Loose(float("nan")), Loose("soon")])
def test_without_a_policy_that_works_the_jobs_own_backoff_decides(policy: Any) -> None:
    settled = retried(raised(ValueError()), retry=policy, job=record(backoff_min_us=300 * SECOND))
    assert 0.9 * 300 * SECOND <= settled.run_at_us - NOW <= 1.1 * 300 * SECOND


@pytest.mark.parametrize(
    ("delay", "run_at"),
    [
        (1.5000007, NOW + 1_500_001),
        (timedelta(minutes=1), NOW + 60 * SECOND),
        (-5, NOW),
        (timedelta.max, LATEST),
        (1e300, LATEST),
    ],
)
def test_a_policys_delay_is_seconds_or_a_timedelta(delay: Any, run_at: int) -> None:
    settled = retried(raised(ValueError()), retry=Loose(delay))
    assert (type(settled.run_at_us), settled.run_at_us) == (int, run_at)


def test_a_policy_sees_the_error_and_may_end_the_job() -> None:
    policy, error = Loose(None), ValueError("hopeless")
    settled = decided(raised(error), retry=policy)
    assert isinstance(settled, Fail)
    assert (settled.attempts, settled.error.message) == (1, "hopeless")
    assert policy.asked == ("j", 1, error)


@pytest.mark.parametrize(
    ("signal", "run_at"),
    [
        (signals.Retry(delay=5), NOW + 5 * SECOND),
        (signals.Retry(delay=timedelta(minutes=1)), NOW + 60 * SECOND),
        (signals.Retry(delay=-5), NOW),
        (signals.Retry(delay=1e15), LATEST),
        (signals.Retry(run_at=AT), to_micros(AT)),
        (signals.Retry(run_at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-23)))), LATEST),
        (signals.Retry(run_at=datetime.min.replace(tzinfo=UTC)), -LATEST),
        (signals.Retry(), NOW + 2 * SECOND),
    ],
)
def test_retry_by_the_handler(signal: signals.Retry, run_at: int) -> None:
    settled = retried(raised(signal), retry=FixedDelays([2]))
    assert (settled.run_at_us, settled.attempts) == (run_at, 1)
    assert settled.error == Failure("Retry", "retry asked for")
    assert isinstance(decided(raised(signal), job=record(attempts=4)), Fail)


def grouped(*errors: Exception) -> Exception:
    return ExceptionGroup("tasks", [ValueError("other"), ExceptionGroup("inner", list(errors))])


def caused(error: Exception) -> Exception:
    wrapped, outer = LookupError("wrapped"), RuntimeError("outer")
    wrapped.__cause__, outer.__cause__ = error, wrapped
    return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (grouped(signals.Retry(delay=5), signals.Unrecoverable("gone")), Fail),
        (grouped(signals.Retry(delay=5)), RetryAt),
        (grouped(signals.Cancel("stale"), signals.Retry(delay=5)), Discard),
        (caused(signals.Unrecoverable("gone")), Fail),
        (caused(signals.Snooze(5)), Release),
        (ExceptionGroup("all", [signals.Snooze(5), signals.Snooze(9)]), Release),
        # A snooze spends no attempt, so it does not hide a failure.
        (grouped(signals.Snooze(5)), RetryAt),
    ],
)
def test_a_signal_counts_inside_groups_and_causes(error: Exception, expected: type[Any]) -> None:
    settled = decided(raised(error))
    assert isinstance(settled, expected)
    if isinstance(settled, (Fail, RetryAt)):
        assert settled.error.type == type(error).__name__
    if isinstance(settled, Release):
        assert settled.run_at_us == NOW + 5 * SECOND


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError(), LookupError()
    first.__cause__, second.__cause__ = second, first
    retried(Raised(first))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: signals.Retry(30), r"write Retry\(delay"),  # type: ignore[arg-type]
        (lambda: signals.Retry(delay=1, run_at=AT), "give one of them, not both"),
        (lambda: signals.Snooze(1, run_at=AT), "give one of them, not both"),
        (lambda: signals.Snooze(), "give a time"),
    ],
)
def test_a_signal_with_a_wrong_time_is_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        make()


# -- what is kept of an exception ---------------------------------------------------------------------------------


def test_describe_has_the_handlers_frames_and_not_ours() -> None:
    failure = describe(raised(ValueError("no")).error)
    assert (failure.type, failure.message) == ("ValueError", "no")
    assert "in raised" in failure.detail
    assert failure.text.startswith("ValueError: no\nTraceback")


def test_describe_is_bounded() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("x" * 100_000)

    try:
        deep(300)
    except ValueError as error:
        failure = describe(error)
    assert len(failure.message) == 500
    assert len(failure.detail) <= MAX_ERROR_CHARS
    long_name = type("N" * 5000, (Exception,), {})
    assert len(describe(long_name()).type) <= 200


def test_describe_survives_an_error_without_words() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("I will not say")

    failure = describe(raised(Mute()).error)
    assert failure.type == "Mute"
    assert "cannot be put in words" in failure.message


def test_describe_gives_a_remote_error_as_it_was() -> None:
    failure = Failure("ValueError", "no", "Traceback ...")
    assert describe(RemoteError(failure)) is failure
    remote = signals.Retry("no", delay=3)
    remote.failure = failure
    assert decided(Raised(remote)) == RetryAt("j", "k", NOW + 3 * SECOND, 1, failure)
