"""The kit on the object-store driver over S3's own protocol. A URL also runs the cases that kill a process."""

from pathlib import Path

import msgspec
import pytest

from taskharbor.conformance import Backend, conformance_tests
from taskharbor.conformance.effort import Effort
from taskharbor.conformance.machine import run_machine
from taskharbor.testing.servers.s3 import fresh_s3_url


def _url(tmp_path: Path) -> str:
    return fresh_s3_url()


globals().update(conformance_tests(_url))


@pytest.mark.timeout(600)
def test_state_machine() -> None:
    """A fifth of the usual effort: every look at a store is dozens of requests to a server written in Python."""
    effort = Effort.from_environment()
    run_machine(Backend(_url), msgspec.structs.replace(effort, examples=max(1, effort.examples // 5)))
