"""The kit on the PostgreSQL driver, on the newest server to be had. A URL also runs the cases that kill a process."""

from conformance.recycled_postgres import recycler
from taskharbor_testkit.conformance import conformance_tests

globals().update(conformance_tests(lambda tmp_path: recycler().fresh_url(), share=1 / 3))
