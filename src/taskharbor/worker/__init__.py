"""The worker. Four loops with one duty each: `fetch`, `run`, `heartbeat`, `settle`; `engine` ties the backend's."""

from taskharbor.worker.worker import Worker

__all__ = ["Worker"]
