"""The kit on the HTTP driver, by way of a broker over PostgreSQL."""

from conformance.recycled_postgres import recycler
from conformance.through_broker import conformance_through_broker

globals().update(conformance_through_broker(lambda directory: recycler().fresh_url()))
