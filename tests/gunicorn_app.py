"""A web application that enqueues at import and in each request, for `gunicorn --preload`. Its store is in the environment."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from taskharbor import Client, Harbor, JobRequest

harbor, client = Harbor(os.environ["TASKHARBOR_URL"]), Client(os.environ["TASKHARBOR_URL"])


@harbor.job
def hello(name: str) -> None: ...


def enqueue(name: str) -> None:
    client.enqueue(JobRequest(type="hello", payload={"name": name}))
    hello.enqueue(name)


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    enqueue(environ["PATH_INFO"])
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


enqueue("before")
