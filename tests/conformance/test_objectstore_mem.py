"""The kit on the object-store driver, in memory: every handle is a writer of its own."""

from taskharbor_testkit.conformance import conformance_tests

globals().update(conformance_tests("mem://{fresh}"))
