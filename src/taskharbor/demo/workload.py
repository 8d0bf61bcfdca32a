"""The jobs of the demo: a seeded mix, and the expected end of each kind of job."""

from __future__ import annotations

import random

import msgspec

from taskharbor.demo import app
from taskharbor.jobs import JobRequest, JobState

MEANT_TO_END: dict[str, frozenset[JobState]] = {
    app.charge_card.type: frozenset({JobState.DEAD}),
    # Cancelled is how a job ends that was merged into another of its key.
    app.sync_account.type: frozenset({JobState.DONE, JobState.CANCELLED}),
}
"""Types not named here are meant to end done, unless the demo cancelled the job itself."""


class Workload(msgspec.Struct, frozen=True):
    """The jobs of the demo, and the times at which they are enqueued."""

    first: list[JobRequest]
    """Enqueued before the workers start."""
    waves: list[list[JobRequest]]
    """Enqueued while they run: keyed jobs, so that some meet a running one of their key."""
    unwanted: list[JobRequest]
    """Scheduled for tomorrow, and cancelled before that."""


def make_workload(jobs: int, seed: int) -> Workload:
    """`jobs` requests in all; the same for the same seed."""
    dice = random.Random(seed)

    def ms(least: int, most: int) -> int:
        return dice.randint(least, most)

    def share(percent: float) -> range:
        return range(max(2, round(jobs * percent / 100)))

    def sync() -> JobRequest:
        keyed = app.sync_account.options(key=f"account-{dice.randrange(max(2, jobs // 60))}", priority=5)
        return keyed.request(ms(60, 200), fails_once=dice.random() < 0.3)

    keyed = [sync() for _ in share(10)]
    first = [
        *(app.resize_image.request(ms(20, 80)) for _ in share(15)),
        *(app.fetch_page.request(ms(10, 40), dice.randint(1, 3)) for _ in share(10)),
        *(app.charge_card.request(index % 2 == 0) for index in share(2)),
        *(app.remind.options(delay=dice.uniform(0.5, 4.0)).request(ms(10, 40)) for _ in share(8)),
        *(app.reset_password.request(ms(10, 40)) for _ in share(4)),
        *(app.call_api.request(ms(20, 60)) for _ in share(5)),
    ]
    unwanted = [app.remind.options(delay=86_400.0).request(1) for _ in share(1)]
    rest = max(0, jobs - len(first) - len(keyed) - len(unwanted))
    first += [app.send_mail.request(ms(40, 160)) for _ in range(rest)]
    dice.shuffle(first)
    size = max(1, len(keyed) // 8)
    waves = [keyed[start : start + size] for start in range(0, len(keyed), size)]
    return Workload(first=first, waves=waves, unwanted=unwanted)
