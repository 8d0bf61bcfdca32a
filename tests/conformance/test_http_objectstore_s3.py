"""The kit on the HTTP driver, by way of a broker over S3's own protocol."""

import pytest

from conformance.through_broker import conformance_through_broker
from taskharbor_testkit.servers.s3 import fresh_s3_url

pytestmark = pytest.mark.slow

globals().update(conformance_through_broker(lambda directory: fresh_s3_url()))
