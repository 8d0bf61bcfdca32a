"""The guarantees, checked over everything that happened: lease overlap, fences, W, run_at, keys, ends, nothing lost.

`audit` takes the attempt log as a DataFrame and gives one row per violation; `audit_lake` and `audit_store` read it from
where it is. Each check is a pure function from rows to violations.

violations       the shape of a violation, rules, and what a lease is
row_checks       checks of single rows, and of their numbers
job_histories    checks of a job's rows in their order, and of jobs that share a key
inflight_limits  the check of max_inflight
run              all checks together, the check against the store, and the result
"""

from __future__ import annotations

from taskharbor.spark.audit.run import AuditResult, audit, audit_lake, audit_store, summarise
from taskharbor.spark.audit.violations import Kind, Violation

__all__ = ["AuditResult", "Kind", "Violation", "audit", "audit_lake", "audit_store", "summarise"]
