"""The program of `S3Server`: moto's S3 behind real HTTP, with conditions that hold and faults that can be planned.

moto compares and writes in two steps, so two writers could both succeed: one lock around every request makes it one step, as
on the real one. Most requests of a driver ask whether an object is still what it was: these are answered here from what moto last
said of it, in a fifth of the time.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Environment: TypeAlias = dict[str, Any]
Respond: TypeAlias = Callable[..., Any]
Application: TypeAlias = Callable[[Environment, Respond], Iterable[bytes]]

PLAN = "/_taskharbor/plan"
"""Takes a JSON list of faults for the next conditional writes."""

_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}</Message></Error>'
_ANSWERS = {
    "conflict_409": ("409 Conflict", "ConditionalRequestConflict"),
    "error_500_before": ("500 Internal Server Error", "InternalError"),
    "error_500_after": ("500 Internal Server Error", "InternalError"),
    "error_503_before": ("503 Slow Down", "SlowDown"),
    "refused_after": ("412 Precondition Failed", "PreconditionFailed"),
    "forbidden_403": ("403 Forbidden", "AccessDenied"),
}


class OneAtATime:
    """The application, one request at a time; and the faults that were planned for it."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._planned: deque[str] = deque()

    def __call__(self, environment: Environment, respond: Respond) -> Iterable[bytes]:
        # All of it, and before the lock: a slow sender must not keep the others waiting.
        body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        environment["wsgi.input"] = io.BytesIO(body)
        if environment["PATH_INFO"] == PLAN:
            # In place of what is left of an earlier plan: it was made for writes that did not come.
            self._planned = deque(json.loads(body))
            respond("204 No Content", [("Content-Length", "0")])
            return []
        with self._lock:
            fault = self._fault(environment)
            if fault is None:
                return list(self._application(environment, respond))
            if fault.endswith("after"):
                list(self._application(environment, lambda *_: None))
        return self._strike(fault, environment, respond)

    def _fault(self, environment: Environment) -> str | None:
        is_conditional = "HTTP_IF_MATCH" in environment or "HTTP_IF_NONE_MATCH" in environment
        if environment["REQUEST_METHOD"] != "PUT" or not is_conditional or not self._planned:
            return None
        return self._planned.popleft() or None

    def _strike(self, fault: str, environment: Environment, respond: Respond) -> Iterable[bytes]:
        if fault.startswith("silent"):
            threading.Event().wait()  # Until the client gives up; a thread of the server waits here for good.
        if fault.startswith("cut"):
            environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("planned")
        status, code = _ANSWERS[fault]
        text = _ERROR.format(code=code).encode()
        respond(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]


class Unchanged:
    """The application; but who asks for an object only if it has changed is told here that it has not."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._tags: dict[str, str] = {}

    def __call__(self, environment: Environment, respond: Respond) -> Iterable[bytes]:
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            self._tags.pop(path, None)
            if method == "POST":
                self._tags.clear()  # One that deletes many.
            return self._application(environment, respond)
        tag = self._tags.get(path)
        if tag is not None and environment.get("HTTP_IF_NONE_MATCH") == tag:
            respond("304 Not Modified", [("ETag", tag), ("Content-Length", "0")])
            return []

        def note(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            found = [value for name, value in headers if name.lower() == "etag"]
            if status.startswith("200") and found:
                self._tags[path] = found[0]
            return respond(status, headers, *rest)

        return self._application(environment, note)


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *_: object) -> None:
        """Thousands of requests, and nobody who reads of them."""


def main(port: int) -> None:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    # Not by way of moto's dispatcher, which looks for the service of every request among all of its own.
    application = OneAtATime(Unchanged(create_backend_app("s3")))
    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=_Handler)
    print(f"ready {port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
