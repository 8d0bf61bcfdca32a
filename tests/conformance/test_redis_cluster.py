"""The kit on a real cluster of three nodes: every queue lives on the node that its name leads to."""

from pathlib import Path

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis_cluster, with_fresh_prefix


def _url(tmp_path: Path) -> str:
    return with_fresh_prefix(shared_redis_cluster().url)


globals().update(conformance_tests(_url, share=1 / 3))
