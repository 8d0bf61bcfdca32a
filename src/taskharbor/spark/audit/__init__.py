"""The guarantees, checked over everything that happened: lease overlap, fences, W, run_at, keys, ends, nothing lost.

`audit` takes the attempt log as a DataFrame and gives one row per violation; `audit_lake` and `audit_store` read it from
where it is. One module per family of checks, each a pure function from rows to violations.
"""

from __future__ import annotations

from taskharbor.spark.audit.kinds import Kind
from taskharbor.spark.audit.result import AuditResult, Violation, summarise
from taskharbor.spark.audit.run import audit, audit_lake, audit_store

__all__ = ["AuditResult", "Kind", "Violation", "audit", "audit_lake", "audit_store", "summarise"]
