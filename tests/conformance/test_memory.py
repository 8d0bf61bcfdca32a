"""The kit on the memory driver, as any author would run it."""

from taskharbor.conformance import conformance_tests
from taskharbor.drivers.memory import MemoryDriver

globals().update(conformance_tests(MemoryDriver))
