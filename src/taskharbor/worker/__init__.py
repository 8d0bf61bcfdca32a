"""The worker. Four loops with one duty each: `fetch`, `run`, `heartbeat`, `settle`; `engine` starts and stops the backend's."""

from taskharbor.worker.worker import Worker

__all__ = ["Worker"]
