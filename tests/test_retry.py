import random
from collections.abc import Callable

import pytest

from records import make_record
from taskharbor.jobs import SECOND, JobRecord
from taskharbor.retry import ExponentialBackoff, FixedDelays

ERROR = ValueError()


def job(minimum: float, maximum: float) -> JobRecord:
    return make_record(backoff_min_us=round(minimum * SECOND), backoff_max_us=round(maximum * SECOND))


def test_back_off_doubles_from_the_jobs_minimum_to_its_maximum_and_never_overflows() -> None:
    policy = ExponentialBackoff(jitter=0)
    delays = [policy.next_delay(job(1, 10), attempts, ERROR) for attempts in (*range(1, 7), 10**6)]
    assert delays == [1, 2, 4, 8, 10, 10, 10]


def test_jitter_spreads_but_respects_minimum_and_maximum() -> None:
    policy = ExponentialBackoff(jitter=0.5, random=random.Random(7))
    for attempts, least, most in ((1, 8, 12), (2, 8, 20), (3, 10, 20)):
        delays = [policy.next_delay(job(8, 20), attempts, ERROR) for _ in range(200)]
        assert len(set(delays)) > 100
        assert least <= min(delays) <= max(delays) <= most
        # No crowd at either bound.
        assert max(map(delays.count, delays)) < 3
    assert {policy.next_delay(job(8, 8), attempts, ERROR) for attempts in range(1, 9)} == {8}


def test_fixed_delays_repeat_the_last() -> None:
    policy = FixedDelays([1, 5])
    assert [policy.next_delay(job(0, 0), n, ERROR) for n in (1, 2, 3, 9)] == [1, 5, 5, 5]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: FixedDelays([]), "seconds"),
        (lambda: FixedDelays([1, -1]), "none negative"),
        (lambda: ExponentialBackoff(factor=0.5), "factor"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()
