"""The worker: leases jobs, runs their handlers, writes how they ended.

The modules, in the order in which a job passes through them:

- `worker`: the worker that a user starts. It shares its jobs out and starts both sides.
- `backend_loop`: starts and stops the loops on the backend's side, keeps leases until they are settled, and sweeps.
- `fetch`: leases jobs.
- `heartbeat_process`: keeps leases from another process while a handler holds the interpreter lock.
- `run`: runs handlers on the event loop, on threads, or many jobs in one call.
- `processes`: runs handlers in processes of their own.
- `process_child`: the other end of such a process, and the messages between both.
- `decide`: which settlement to write for an execution.
- `settle`: writes settlements.
- `process_setup`: settings and signals of a process that works.
- `supervise`: keeps several worker processes running.
- `health`: tells over HTTP how a worker is.
- `logs`: the log output of a worker process.
"""

from taskharbor.worker.worker import Worker

__all__ = ["Worker"]
