"""The kit on the HTTP driver, by way of a broker over Redis."""

from pathlib import Path

from conformance.through_broker import conformance_through_broker
from taskharbor_testkit.servers import given_or_shared_redis, with_fresh_prefix


def _url(directory: Path) -> str:
    return with_fresh_prefix(given_or_shared_redis().url)


globals().update(conformance_through_broker(_url))
