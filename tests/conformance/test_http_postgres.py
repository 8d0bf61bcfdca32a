"""The kit on the HTTP driver, by way of a broker over PostgreSQL."""

import pytest

from conformance.recycled_postgres import recycler
from conformance.through_broker import conformance_through_broker

pytestmark = pytest.mark.slow

globals().update(conformance_through_broker(lambda directory: recycler().fresh_url()))
