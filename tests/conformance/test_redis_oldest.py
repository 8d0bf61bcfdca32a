"""The same on the oldest Redis the driver works with."""

from pathlib import Path

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis, with_fresh_prefix


def _url(tmp_path: Path) -> str:
    return with_fresh_prefix(shared_redis("oldest").url)


globals().update(conformance_tests(_url, share=1 / 3))
