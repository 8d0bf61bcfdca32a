"""The named cases, one module per part of the contract. Importing this package registers all of them.

In the order in which they run:
- `enqueue`, `reserve`, `leases`, `settle`, `stalls`: accept, claim, heartbeat, settle, expired leases;
- `limits`, `clocks`, `keyed`, `operate`: limits and pause, callers' clocks, keys, operators' calls;
- `bad_input`, `inspection`, `retention`, `bulk`, `waiting`: refused values, reading, removing, bulk calls, waiting;
- `texts`, `numbers`, `handles`: hostile values in every field, and changes that every handle sees;
- `concurrency`, `crash`, `large`: many clients at once, killed processes, and batches of 5,000 jobs.
"""

from importlib import import_module

from taskharbor_testkit.conformance.case import collect

FILES = ["enqueue", "reserve", "leases", "settle", "stalls", "limits", "clocks", "keyed", "operate"]
FILES += ["bad_input", "inspection", "retention", "bulk", "waiting", "texts", "numbers", "handles"]
FILES += ["concurrency", "crash", "large"]
"""In the order in which they run: the calls that the others build on come first, slow cases come last."""

for _name in FILES:
    collect(import_module(f"{__name__}.{_name}"))
