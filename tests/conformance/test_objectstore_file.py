"""The kit on the object-store driver over a folder. A URL also runs the cases that kill a process."""

import pytest

from taskharbor_testkit.conformance import conformance_tests

pytestmark = pytest.mark.slow

globals().update(conformance_tests(lambda tmp_path: f"file://{tmp_path}/store", share=1 / 3))
