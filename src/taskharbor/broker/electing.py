"""Which stores have a leader: those whose driver can be led. Over all others any number of brokers answer side by side."""

from __future__ import annotations

from taskharbor.broker.leads import Candidacy, Leads
from taskharbor.drivers.contract import Driver


def candidacy_for(driver: Driver, *, url: str, term: float) -> Candidacy | None:
    """`url`: where clients reach this broker, should it lead. `term`: seconds that a leader may be silent."""
    if not callable(getattr(driver, "lead", None)):
        return None
    from taskharbor.drivers.objectstore.leading import Leadership

    def stand(led: Driver) -> Leads:
        return Leadership(led, url=url, term=term)  # type: ignore[arg-type]

    return stand
