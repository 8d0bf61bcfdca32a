"""The worker: leases jobs, runs their handlers, writes how they ended. Four loops with one duty each.

`worker` is what a user starts; `backend_loop` starts and stops the backend's loops, and sweeps. A job passes through `fetch`
(leased), `run` (on the event loop, on threads, many in one call) or `processes` (with `process_child` at the other end),
`decide` (what is written for it) and `settle` (written); `heartbeat` keeps its lease meanwhile. `process_setup` sets up a process
that works, `supervise` keeps several of them running, `health` and `logs` tell how they are.
"""

from taskharbor.worker.worker import Worker

__all__ = ["Worker"]
