"""The kit on the object-store driver over S3's own protocol. A URL also runs the cases that kill a process."""

import pytest

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers.s3 import fresh_s3_url

pytestmark = pytest.mark.slow

# Every look at a store is dozens of requests to a server written in Python.
globals().update(conformance_tests(lambda tmp_path: fresh_s3_url(), share=1 / 5))
