"""Schedules: a job at each tick, on a clock that moves by hand. Two days around the night when summer time begins."""

from datetime import UTC, datetime, timedelta

from taskharbor import Harbor
from taskharbor.testing import FakeClock, drain

clock = FakeClock(datetime(2026, 3, 28, tzinfo=UTC))
harbor = Harbor("sqlite:///schedules.db", clock=clock)
reports: list[str] = []
polls: list[datetime] = []


@harbor.job(cron="30 2 * * *", zone="Europe/Berlin")
async def report(at: datetime) -> None:
    reports.append(f"{at:%d %H:%M}")


@harbor.job
async def poll(at: datetime) -> None:
    polls.append(at)


harbor.schedule("poll-often", poll, every=timedelta(minutes=15), overlap="skip")

if __name__ == "__main__":
    drain(harbor, until=timedelta(days=2))
    print("reports at", reports, "UTC, and", len(polls), "polls")
    assert reports == ["28 01:30", "29 01:00"]  # On the 29th, 02:30 does not exist: it is 03:00 then.
    assert len(polls) == 2 * 96 + 1

    # Six hours without a worker: one missed tick of each is made later.
    clock.advance(timedelta(hours=6))
    drain(harbor)
    assert (reports[-1], len(polls)) == ("30 00:30", 2 * 96 + 2)

    harbor.client.schedules.pause("poll-often", "the service is down")
    harbor.client.schedules.trigger("report")
    assert drain(harbor, until=timedelta(hours=1)).done == 1
    for info in harbor.client.schedules.list(app=harbor):
        print(info.name, info.state, info.note or "", *info.next[:1])
