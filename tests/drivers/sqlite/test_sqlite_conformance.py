"""The whole conformance kit on a database file."""

from pathlib import Path

from taskharbor.conformance import conformance_tests


def _fresh(directory: Path) -> str:
    return f"sqlite:///{directory}/jobs.db"


globals().update(conformance_tests(_fresh))
