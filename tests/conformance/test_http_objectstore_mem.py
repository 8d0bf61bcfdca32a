"""The kit on the HTTP driver, by way of a broker over an object store in the broker's memory."""

import pytest

from conformance.through_broker import conformance_through_broker

pytestmark = pytest.mark.slow

globals().update(conformance_through_broker(lambda directory: "mem://"))
