"""The named cases, one file per part of the contract. Importing this package registers all of them."""

from importlib import import_module

FILES = (
    "enqueue",
    "reserve",
    "order",
    "leases",
    "settle",
    "stalls",
    "limits",
    "clocks",
    "idempotency",
    "keyed",
    "cancel",
    "requeue",
    "bad_input",
    "failure_queue",
    "inspection",
    "retention",
    "attempt_log",
    "keyed_flags",
    "waiting",
    "concurrency",
    "crash",
)
"""In the order in which they run: what everything else stands on comes first, what takes time comes last."""

for _name in FILES:
    import_module(f"{__name__}.{_name}")
