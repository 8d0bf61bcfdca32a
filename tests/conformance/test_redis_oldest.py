"""The kit on the oldest Redis that the driver works with."""

from pathlib import Path

import pytest

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis, with_fresh_prefix

pytestmark = pytest.mark.installed


def _url(tmp_path: Path) -> str:
    return with_fresh_prefix(shared_redis("7.0").url)


globals().update(conformance_tests(_url, share=1 / 3))
