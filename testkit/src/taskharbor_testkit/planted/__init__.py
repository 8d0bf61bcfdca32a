"""Planted bugs: broken drivers that the conformance kit must catch.

A kit that passes everything proves nothing. Each bug breaks one rule of the contract, as a driver's author might, by
overriding one method of the reference model. `python -m taskharbor_testkit.planted` tells which case catches which bug;
PLANTED.md beside the package's README is its output.

- `registry`: the list of bugs;
- `producing`, `leasing`, `settling`, `operating`: the bugs, by part of the contract;
- `batches`, `values`, `handles`: the bugs, by kind: silent limits, changed values, handles that trust their memory;
- `table`: the cases that catch each bug;
- `__main__`: prints that table.
"""

from taskharbor_testkit.planted import batches, handles, leasing, operating, producing, settling, values
from taskharbor_testkit.planted.registry import PLANTED, RULES

__all__ = [
    "PLANTED", "RULES", "batches", "handles", "leasing", "operating", "producing", "settling", "values",
]  # fmt: skip
