"""The conformance kit: the judge of every driver, ours and anyone's.

A driver's author writes one factory and has the whole suite:

    from taskharbor.conformance import conformance_tests

    globals().update(conformance_tests(lambda tmp_path: MyDriver(tmp_path / "jobs.db")))

Named cases say in plain sight what the contract demands; a state machine looks for what nobody thought of by
driving the driver and a reference model side by side. `python -m taskharbor.conformance URL` runs both without
pytest.
"""

from taskharbor.errors import MissingExtra

try:
    import hypothesis
    import pytest
except ImportError as missing:
    raise MissingExtra(
        f"the conformance kit needs {missing.name}: pip install 'taskharbor[conformance]'"
    ) from missing

from taskharbor.conformance import cases as _cases
from taskharbor.conformance.backend import Backend, Store
from taskharbor.conformance.case import CASES, Case
from taskharbor.conformance.invariants import INVARIANTS
from taskharbor.conformance.model import Model
from taskharbor.conformance.runner import Report, Verdict, check
from taskharbor.conformance.suite import conformance_tests

del _cases, hypothesis, pytest

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
