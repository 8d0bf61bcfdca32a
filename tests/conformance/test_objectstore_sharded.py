"""The kit's cases on queues of three shards with small segments, as far as they apply: all jobs of a key are in one shard, and
there every rule holds.

Order, W and the sequence of leases in the log hold per shard only, so cases about those do not apply; `test_queue` has
what does. For the same reason every combination of flags has a store to itself here.
"""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from taskharbor.jobs import UpdateFlags
from taskharbor_testkit.conformance import CASES
from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.case import Case, run_case
from taskharbor_testkit.conformance.cases.keyed import COMBINATIONS, MEETINGS

BACKEND = Backend.from_url("mem://{fresh}?shards=3&segment_rows=3&merge=2")
APPLY = (
    *("enqueue.*", "retention.*", "settle.*deaths*", "inspection.*pages*"),
    *("concurrency.the_same*", "bulk.the_streams*", "bulk.shares*", "waiting.no_wake_up*", "waiting.every*"),
)


@pytest.mark.parametrize("case", [name for name in CASES if any(fnmatch(name, one) for one in APPLY)])
def test_cases(case: str, tmp_path: Path) -> None:
    run_case(CASES[case], BACKEND, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_conformance(meeting: str, flags: UpdateFlags, tmp_path: Path) -> None:
    run_case(Case(meeting, lambda twin: MEETINGS[meeting](twin, [flags])), BACKEND, tmp_path)
