"""The kit on a real cluster of three nodes: every queue lives on the node that its name leads to."""

import pytest

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis_cluster, with_fresh_prefix

pytestmark = pytest.mark.slow

globals().update(
    conformance_tests(lambda tmp_path: with_fresh_prefix(shared_redis_cluster().url), share=1 / 3)
)
