import pytest

from taskharbor.clock import RESAMPLE_AFTER, BackendClock, FakeClock
from taskharbor.jobs import SECOND


def test_the_fake_clock_stands_still() -> None:
    clock = FakeClock()
    assert clock.now() == clock.now()
    before = clock.now()
    assert clock.advance(1.5) - before == 1_500_000
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1)


class Host:
    """A machine whose wall clock is wrong and whose round trips take time."""

    def __init__(self, skew: int, round_trips: list[int]) -> None:
        self.monotonic, self.skew, self.round_trips = 5 * SECOND, skew, round_trips

    async def sample(self) -> int:
        trip = self.round_trips.pop(0)
        self.monotonic += trip // 2
        backend = self.monotonic + self.skew
        self.monotonic += trip - trip // 2
        return backend


async def test_the_backend_clock_follows_the_backend_however_wrong_the_host_is() -> None:
    host = Host(skew=3600 * SECOND, round_trips=[40_000, 2_000, 30_000])
    clock = BackendClock(host.sample, lambda: host.monotonic)
    with pytest.raises(RuntimeError, match="sync"):
        clock.now()
    await clock.sync()
    assert abs(clock.now() - (host.monotonic + host.skew)) <= 1_000  # half of the quickest round trip
    host.monotonic += 10 * SECOND
    assert not clock.is_due
    host.monotonic += RESAMPLE_AFTER
    assert clock.is_due


async def test_the_backend_clock_never_goes_back() -> None:
    host = Host(skew=10 * SECOND, round_trips=[0] * 6)
    clock = BackendClock(host.sample, lambda: host.monotonic)
    await clock.sync()
    before = clock.now()
    host.skew = 0
    await clock.sync()
    assert clock.now() == before
    host.monotonic += 11 * SECOND
    assert clock.now() == host.monotonic
