"""The attempt log in its stream: rows that ended alike share an entry, and who reads them cannot tell."""

from __future__ import annotations

from drivers.redis.redis_shelf import LEASE, Shelf, ack, fail, release
from records import NOW
from taskharbor.drivers.contract import QueueSettings
from taskharbor.jobs import SECOND, Attempt, Outcome

DAY = 86_400 * SECOND
MOST_ROWS = 100


def entries(on: Shelf) -> int:
    return int(on.ask("XLEN", "attempts"))


async def whole_log(on: Shelf, page_size: int = 10_000) -> list[Attempt]:
    found: list[Attempt] = []
    cursor = None
    while (page := await on.driver.read_attempts(after=cursor, limit=page_size)).attempts:
        found += page.attempts
        cursor = page.cursor
    return found


async def test_jobs_that_are_done_together_share_entries(on: Shelf) -> None:
    held = await on.claimed(2 * MOST_ROWS + 1)
    on.now += 5
    await on.settle(*map(ack, held))
    assert entries(on) == 3
    rows = await whole_log(on)
    assert [row.job_id for row in rows] == [job.id for job in held]
    assert len({row.seq for row in rows}) == len(rows)
    assert {(row.outcome, row.fence, row.worker) for row in rows} == {(Outcome.DONE, 1, "w1")}
    times = {(row.reserved_at_us, row.lease_expires_at_us, row.ended_at_us) for row in rows}
    assert times == {(NOW, NOW + LEASE, NOW + 5)}
    for n in (0, 99, 100, 150, 200):
        assert await on.log(held[n].id) == [rows[n]]


async def test_what_ended_otherwise_has_an_entry_of_its_own(on: Shelf) -> None:
    held = await on.claimed(6, max_attempts=1)
    await on.settle(ack(held[0]), ack(held[1]), fail(held[2]), ack(held[3]))
    on.now += 1
    await on.settle(ack(held[4]))
    (other,) = await on.claimed(1)
    on.now += 1
    await on.settle(ack(held[5]), ack(other))
    rows = await whole_log(on)
    assert [row.job_id for row in rows] == [*(job.id for job in held), other.id]
    assert [row.outcome for row in rows].index(Outcome.DEAD) == 2
    assert (rows[2].error_type, rows[2].error_message) == ("ValueError", "boom")
    assert {row.error_type for row in rows[:2] + rows[3:]} == {None}
    assert entries(on) == 6  # Only the first two are alike.


async def test_pages_end_within_entries_and_merge_queues_by_row(on: Shelf) -> None:
    expected: list[str] = []
    # Full entries, half ones and many of one row: a page has to find out how many it takes.
    for n, count in enumerate((130, *[1] * 40, 100, *[3] * 20, 20)):
        held = await on.claimed(count, queue=f"q{n % 3}")
        on.now += 1
        await on.settle(*map(ack, held))
        expected += [job.id for job in held]
    for limit in (7, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 1000):
        assert [row.job_id for row in await whole_log(on, limit)] == expected


async def test_a_job_finds_its_rows_in_the_entries_of_others(on: Shelf) -> None:
    held = await on.claimed(50)
    for turn in range(4):
        on.now += 1
        await on.settle(*map(release, held))
        held = await on.reserve(50)
        assert {job.fence for job in held} == {turn + 2}
    on.now += 1
    await on.settle(*map(ack, held))
    assert entries(on) == 5
    for job in held[::7]:
        rows = await on.log(job.id)
        assert [row.fence for row in rows] == [1, 2, 3, 4, 5]
        assert {row.job_id for row in rows} == {job.id}
        assert [row.outcome for row in rows] == [Outcome.RELEASED] * 4 + [Outcome.DONE]


async def test_a_row_that_retention_took_is_not_looked_for_in_what_came_after(on: Shelf) -> None:
    await on.driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=on.now)
    for _ in range(2):
        (job,) = await on.reserve() or await on.claimed(1)
        await on.settle(release(job))
        on.now += 2 * DAY
    (other,) = await on.claimed(1, priority=1)
    await on.settle(ack(other))
    rows = await on.log(job.id)
    assert [row.fence for row in rows] == [1, 2]
    assert await on.driver.prune(now=on.now - 3 * DAY) == 1
    assert await on.log(job.id) == rows[1:]
    assert await on.driver.prune(now=on.now) == 1
    assert await on.log(job.id) == []
    assert [row.job_id for row in await on.log(other.id)] == [other.id]


async def test_retention_takes_as_many_rows_as_it_may_wherever_entries_end(on: Shelf) -> None:
    await on.driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=on.now)
    late = await on.claimed(10)
    for count in (40, 100, 40):
        held = await on.claimed(count)
        on.now += 10
        await on.settle(*map(ack, held))
    on.now -= 5  # A clock that is behind: these ended before those in front of them.
    await on.settle(*map(ack, late))
    assert (entries(on), on.ask("ZCARD", "late")) == (13, 10)
    rows = await whole_log(on)
    in_front, behind = rows[:180], rows[180:]
    # The first 140 and the late ones are due.
    for limit, left in ((7, 173), (60, 113), (50, 63), (23, 40)):
        assert await on.driver.prune(now=on.now + DAY, limit=limit) == limit
        assert await whole_log(on) == in_front[180 - left :] + behind
        gone, kept = in_front[180 - left - 1], in_front[180 - left]
        assert await on.log(gone.job_id) == []
        assert await on.log(kept.job_id) == [kept]
        assert (await on.driver.read_attempts(limit=1)).attempts == [kept]
    assert await on.driver.prune(now=on.now + DAY, limit=4) == 4
    assert await on.driver.prune(now=on.now + DAY, limit=9) == 6
    assert await whole_log(on) == in_front[140:]
    assert await on.driver.prune(now=on.now + DAY + 5, limit=30) == 30
    assert await whole_log(on) == in_front[170:]
    assert [await on.driver.prune(now=on.now + DAY + 5, limit=30) for _ in range(2)] == [10, 0]
    assert (entries(on), on.ask("EXISTS", "late")) == (0, 0)
    (again,) = await on.claimed(1)
    await on.settle(ack(again))
    assert [row.job_id for row in await whole_log(on)] == [again.id]
