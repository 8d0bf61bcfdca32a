"""The HTTP driver, for programs that cannot reach the store: every call goes to a broker, which makes it there.

driver              the handle: contract calls, clones, waiting
broker_connections  the options of the URL, and one call: connections, repeated tries, the leader among several brokers

`taskharbor.drivers.broker_protocol` has the form of calls and answers, for both sides. A broker needs it, and must do without
aiohttp.
"""

from taskharbor.drivers.http.driver import HttpDriver

__all__ = ["HttpDriver"]
