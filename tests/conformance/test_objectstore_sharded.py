"""The kit's cases about keys, on queues of three shards: all jobs of a key are in one of them, and there every rule holds.

Order, W and the sequence of leases in the log hold per shard only, so cases about those do not apply; `test_queue` has
what does. For the same reason every combination of flags has a store to itself here.
"""

from pathlib import Path

import pytest

from taskharbor.jobs import UpdateFlags
from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.case import Case, run_case
from taskharbor_testkit.conformance.cases.keyed import COMBINATIONS, MEETINGS

pytestmark = pytest.mark.slow

BACKEND = Backend.from_url("mem://{fresh}?shards=3")


@pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_conformance(meeting: str, flags: UpdateFlags, tmp_path: Path) -> None:
    run_case(Case(meeting, lambda twin: MEETINGS[meeting](twin, [flags])), BACKEND, tmp_path)
