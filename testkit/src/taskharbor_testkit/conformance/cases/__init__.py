"""The named cases, one module per part of the contract. Importing this package registers all of them.

In the order in which they run:
- `enqueue`, `reserve`, `leases`, `settle`, `stalls`: accept, claim, heartbeat, settle, expired leases;
- `limits`, `clocks`, `keyed`, `operate`: limits and pause, callers' clocks, keys, operators' calls;
- `bad_input`, `inspection`, `retention`, `bulk`, `waiting`: refused values, reading, removing, bulk calls, waiting;
- `concurrency`, `crash`: many clients at once, and killed processes.
"""

from importlib import import_module

from taskharbor_testkit.conformance.case import collect

FILES = ["enqueue", "reserve", "leases", "settle", "stalls", "limits", "clocks", "keyed", "operate"]
FILES += ["bad_input", "inspection", "retention", "bulk", "waiting", "concurrency", "crash"]
"""In the order in which they run: the calls that the others build on come first, slow cases come last."""

for _name in FILES:
    collect(import_module(f"{__name__}.{_name}"))
