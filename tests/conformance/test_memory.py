"""The kit on the memory driver, as any author would run it."""

from taskharbor.drivers.memory import MemoryDriver
from taskharbor_testkit.conformance import conformance_tests

globals().update(conformance_tests(MemoryDriver))
