"""The driver for who has no way to the store: every call goes to a broker, which makes it there.

driver      the handle: contract calls, clones, waiting
options     what the URL says
protocol    form of calls and answers, as both ends know it: the broker reads this file too
brokers     one call on its way: connections, repeated tries, the leader among several brokers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskharbor.drivers.http.driver import HttpDriver

__all__ = ["HttpDriver"]


def __getattr__(name: str) -> Any:
    # A broker needs the protocol only, and must do without aiohttp.
    if name == "HttpDriver":
        from taskharbor.drivers.http.driver import HttpDriver

        return HttpDriver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
