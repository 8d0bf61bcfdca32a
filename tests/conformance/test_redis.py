"""The kit on the Redis driver, on the newest server to be had. A URL also runs the cases that kill a process."""

from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import given_or_shared_redis, with_fresh_prefix

globals().update(
    conformance_tests(lambda tmp_path: with_fresh_prefix(given_or_shared_redis().url), share=1 / 3)
)
