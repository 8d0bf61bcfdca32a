"""Finds the driver for a URL. All drivers register by entry point (`taskharbor.drivers`), TaskHarbor's own too."""

from __future__ import annotations

import difflib
import re
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from taskharbor.drivers.contract import Driver
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import InvalidRequest, MissingExtra, UnknownDriver

GROUP = "taskharbor.drivers"


def installed_drivers() -> dict[str, EntryPoint]:
    """Return the entry points by URL scheme. Nothing is imported until it is used."""
    return dict(_announced(tuple(sys.path)))


@lru_cache(maxsize=4)
def _announced(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Cached: a search reads the metadata of every installed package, which takes longer than opening a store."""
    return {point.name: point for point in entry_points(group=GROUP)}


def connect(url: str) -> Driver:
    """Return the driver for a URL's scheme, not yet open: `memory://`, `sqlite:///jobs.db`, ...

    Raises:
        UnknownDriver: No installed driver knows the scheme.
        MissingExtra: The packages of the driver are not installed.
        InvalidRequest: An option of the URL is wrong.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or not re.fullmatch(r"[\w+.-]+", scheme):
        raise InvalidRequest(
            f"{shown_url(url)!r} is not a driver URL: write it like sqlite:///jobs.db or memory://"
        )
    known = installed_drivers()
    point = known.get(scheme)
    if point is None:
        near = difflib.get_close_matches(scheme, known, n=1)
        instead = f"did you mean {near[0]}://?" if near else f"installed: {', '.join(sorted(known))}"
        raise UnknownDriver(f"no installed driver answers to {scheme}:// ({instead})")
    try:
        driver = point.load()
    except ImportError as missing:
        # A driver's folder has the name of its extra, while one driver may have several schemes.
        extra = point.module.rpartition(".")[2] if point.module.startswith("taskharbor.") else scheme
        raise MissingExtra(
            f"the {scheme}:// driver needs packages that are not installed ({missing}): "
            f"pip install 'taskharbor[{extra}]'"
        ) from missing
    if not (isinstance(driver, type) and issubclass(driver, Driver)):
        raise UnknownDriver(f"entry point {point.value!r} for {scheme}:// is not a Driver class")
    return driver.from_url(url)
