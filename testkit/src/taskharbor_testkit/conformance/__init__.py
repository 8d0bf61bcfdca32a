"""The conformance kit: checks any driver against the contract.

A driver's author writes one factory and has the whole suite:

    from taskharbor_testkit.conformance import conformance_tests

    globals().update(conformance_tests(lambda tmp_path: MyDriver(tmp_path / "jobs.db")))

Named cases state the rules of the contract. A state machine drives the driver and a reference model side by side, and finds
errors that nobody thought of. `python -m taskharbor_testkit.conformance URL` runs both without pytest.

- `backend`: fresh stores, made by the author's factory;
- `twin`: a driver beside the model; `calls` replays each call on the model, `snapshot` compares everything visible, `invariants`
  judges it by named rules;
- `case`, `cases`: the named cases, and their registry; `victim` is the process that some of them kill;
- `machine`: the state machine, with values from `strategies`;
- `runner`: all of it, as pytest tests or as a report;
- `__main__`: the same from the command line.
"""

from taskharbor_testkit.conformance import cases as _cases
from taskharbor_testkit.conformance.backend import Backend
from taskharbor_testkit.conformance.case import CASES
from taskharbor_testkit.conformance.invariants import INVARIANTS
from taskharbor_testkit.conformance.runner import check, conformance_tests

del _cases

__all__ = ["CASES", "INVARIANTS", "Backend", "check", "conformance_tests"]
