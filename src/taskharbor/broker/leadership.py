"""Leadership, as far as the broker cares: who leads, and a task that keeps it so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from taskharbor.drivers.contract import Driver


class Leads(Protocol):
    """Whether this broker may answer. Over a store that several brokers can share there is none, and all answer."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def leader_url(self) -> str | None:
        """Where the leader is, as far as is known; our own address while we lead."""

    async def run(self) -> None:
        """Take, renew, lose and take again, until cancelled."""

    async def resign(self) -> None:
        """Give leadership back at once, so that a standby need not wait for the term to end."""

    def look_now(self) -> None:
        """A call failed in a way that a new leader would explain: do not wait for the next renewal to find out."""


Candidacy: TypeAlias = Callable[[Driver], Leads]
"""Makes a candidate of a driver that is open."""


def candidacy_for(driver: Driver, *, url: str, term: float) -> Candidacy | None:
    """`url`: where clients reach this broker, should it lead. `term`: seconds that a leader may be silent."""
    if not callable(getattr(driver, "lead", None)):
        return None
    from taskharbor.drivers.objectstore.leading import Leadership

    def stand(led: Driver) -> Leads:
        return Leadership(led, url=url, term=term)  # type: ignore[arg-type]

    return stand
