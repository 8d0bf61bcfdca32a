"""The conformance kit: the judge of every driver, ours and anyone's.

A driver's author writes one factory and has the whole suite:

    from taskharbor_testkit.conformance import conformance_tests

    globals().update(conformance_tests(lambda tmp_path: MyDriver(tmp_path / "jobs.db")))

Named cases say in plain sight what the contract demands; a state machine looks for what nobody thought of by
driving the driver and a reference model side by side. `python -m taskharbor_testkit.conformance URL` runs both without
pytest.
"""

from taskharbor_testkit.conformance import cases as _cases
from taskharbor_testkit.conformance.backend import Backend, Store
from taskharbor_testkit.conformance.case import CASES, Case
from taskharbor_testkit.conformance.invariants import INVARIANTS
from taskharbor_testkit.conformance.runner import Report, Verdict, check
from taskharbor_testkit.conformance.suite import conformance_tests
from taskharbor_testkit.model import Model

del _cases

__all__ = [
    "CASES",
    "INVARIANTS",
    "Backend",
    "Case",
    "Model",
    "Report",
    "Store",
    "Verdict",
    "check",
    "conformance_tests",
]
