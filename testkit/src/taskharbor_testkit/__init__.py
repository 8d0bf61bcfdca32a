"""Test tools for drivers and for TaskHarbor as a whole.

A driver's author writes one test file:

    from taskharbor_testkit import conformance_tests

    globals().update(conformance_tests(lambda tmp_path: MyDriver(tmp_path / "jobs.db")))

In the order in which they build on each other:
- `model`: the reference model, the contract in plain dicts and lists;
- `conformance`: the kit that compares a driver with the model, case by case and in random histories;
- `waits`: a caller of `wait`, for tests;
- `planted`: broken drivers that the kit must catch;
- `simulation`: workers and clients on virtual time, with faults between them and the store;
- `servers`: real PostgreSQL, Redis and S3 servers, and proxies that cut their connections;
- `histories`: made-up attempt logs for the pipeline and its audit.
"""

from taskharbor_testkit.conformance import CASES, INVARIANTS, Backend, check, conformance_tests

__all__ = ["CASES", "INVARIANTS", "Backend", "check", "conformance_tests"]
