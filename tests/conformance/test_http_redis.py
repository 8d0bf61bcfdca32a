"""The kit on the HTTP driver, by way of a broker over Redis."""

import pytest

from conformance.through_broker import conformance_through_broker
from taskharbor_testkit.servers import given_or_shared_redis, with_fresh_prefix

pytestmark = pytest.mark.slow

globals().update(conformance_through_broker(lambda directory: with_fresh_prefix(given_or_shared_redis().url)))
