"""The kit on the oldest PostgreSQL to be had: what a newer server forgives shows here."""

import pytest

from conformance.recycled_postgres import recycler
from taskharbor_testkit.conformance import conformance_tests

pytestmark = pytest.mark.slow

globals().update(conformance_tests(lambda tmp_path: recycler(oldest=True).fresh_url(), share=1 / 3))
