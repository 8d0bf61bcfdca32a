"""The kit on the object-store driver, in memory: every handle is a writer of its own."""

import pytest

from taskharbor_testkit.conformance import conformance_tests

pytestmark = pytest.mark.slow

globals().update(conformance_tests("mem://{fresh}"))
