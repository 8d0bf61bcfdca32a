"""The named cases, one module per part of the contract. Importing this package registers all of them."""

from importlib import import_module

from taskharbor_testkit.conformance.case import collect

FILES = ["enqueue", "reserve", "leases", "settle", "stalls", "limits", "clocks", "keyed", "operate"]
FILES += ["bad_input", "inspection", "retention", "bulk", "waiting", "concurrency", "crash"]
"""In the order in which they run: the calls that the others build on come first, slow cases come last."""

for _name in FILES:
    collect(import_module(f"{__name__}.{_name}"))
