"""The kit on the HTTP driver, by way of a broker over SQLite."""

from conformance.through_broker import conformance_through_broker

globals().update(conformance_through_broker(lambda directory: f"sqlite:///{directory}/jobs.db"))
