"""The guarantees, checked over everything that happened: lease overlap, fences, W, run_at, keys, ends, nothing lost.

`audit` takes the attempt log as a DataFrame and gives one row per violation; `audit_lake` and `audit_store` read it from
where it is. Each check is a pure function from rows to violations.

run         all checks together over a log, a lake or a store, and the result
checks      the checks, each SQL with the conditions of violations; `rules.toml` has what is said of them
stored      a store, read to be compared with its log
violations  the kinds of violations, and the form of one
"""

from __future__ import annotations

from taskharbor.spark.audit.run import AuditResult, audit, audit_lake, audit_store, summarise
from taskharbor.spark.audit.violations import Kind, Violation

__all__ = ["AuditResult", "Kind", "Violation", "audit", "audit_lake", "audit_store", "summarise"]
