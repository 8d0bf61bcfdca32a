"""The kit on the oldest Redis that the driver works with."""

import pytest

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import shared_redis, with_fresh_prefix

pytestmark = pytest.mark.installed

globals().update(conformance_tests(lambda tmp_path: with_fresh_prefix(shared_redis("7.0").url), share=1 / 3))
