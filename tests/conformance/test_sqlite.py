"""The kit on the SQLite driver, as any author would run it. A URL also runs the cases that kill a process."""

from taskharbor_testkit.conformance import conformance_tests

globals().update(conformance_tests(lambda tmp_path: f"sqlite:///{tmp_path}/jobs.db", share=1 / 3))
