"""The HTTP driver, for programs that cannot reach the store: every call goes to a broker, which makes it there.

options             the options of the URL
driver              the handle: contract calls, clones, waiting
protocol            the form of calls and answers, for both sides: the broker uses this file too
broker_connections  sends one call: connections, repeated tries, the leader among several brokers
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
