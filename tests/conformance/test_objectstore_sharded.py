"""The kit's cases about keys, on queues of three shards: all jobs of a key are in one of them, and there every rule holds.

Order, W and the sequence of leases in the log hold per shard only, so cases about those do not apply; `test_driver_shards` has
what does.
"""

from pathlib import Path

import pytest

from taskharbor.conformance import CASES
from taskharbor.conformance.backend import Backend
from taskharbor.conformance.case import run_case

BACKEND = Backend.from_url("mem://{fresh}?shards=3")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("keyed_flags.")])
def test_conformance(name: str, tmp_path: Path) -> None:
    run_case(CASES[name], BACKEND, tmp_path)
