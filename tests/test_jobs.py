from datetime import UTC, datetime, timedelta, timezone

import pytest

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobRecord, JobState, to_datetime, to_micros


def test_instants_are_exact_in_any_zone_and_refused_without_one() -> None:
    when = datetime(2199, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    assert to_datetime(to_micros(when)) == when
    noon = datetime(2026, 6, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert to_micros(noon) == to_micros(datetime(2026, 6, 1, 10, tzinfo=UTC))
    assert to_datetime(to_micros(noon)).tzinfo is UTC
    with pytest.raises(InvalidRequest, match="no time zone"):
        to_micros(datetime(2026, 1, 1))


def test_a_record_shows_its_instants_as_datetimes() -> None:
    record = JobRecord(id="1", type="t", run_at_us=1_000_001, created_at_us=0, timeout_us=2_500_000)
    assert record.run_at == datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC)
    assert record.timeout == timedelta(seconds=2.5)
    assert record.failed_at is record.finished_at is record.expires_at is record.reserved_at is None
    assert record.lease is None


def test_states_know_what_they_are() -> None:
    assert [str(state) for state in JobState if state.is_terminal] == ["done", "dead", "cancelled"]
    assert [str(state) for state in JobState if state.is_waiting] == ["scheduled", "ready", "blocked"]
