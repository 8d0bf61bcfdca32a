"""A worker's health over HTTP: `/health` (the process lives) and `/ready` (it serves and its backend answers).

On a daemon thread of its own, so it answers while handlers keep the event loop busy. It says names, numbers and
yes or no: no URL, no payload, no token.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

import msgspec

from taskharbor.errors import InvalidRequest

Look: TypeAlias = Callable[[], tuple[bool, dict[str, Any]]]
"""Tells if the worker is ready, and the details to answer with. Called from the server's threads."""

DEFAULT_HOST = "127.0.0.1"


class HealthServer(ThreadingHTTPServer):
    """Serves from `start` until `stop`. Port 0 takes any free port; `address` says which."""

    daemon_threads = True

    def __init__(self, host: str, port: int, look: Look) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._look = look
        self._started = time.monotonic()
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="taskharbor-health", daemon=True
        )

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        shown = host.decode() if isinstance(host, bytes) else str(host)
        return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join(1)
        self.server_close()

    def answer(self, path: str) -> tuple[HTTPStatus, dict[str, Any]]:
        uptime = round(time.monotonic() - self._started, 1)
        match path.partition("?")[0].removesuffix("/"):
            case "/health":
                return HTTPStatus.OK, {"status": "alive", "uptime": uptime}
            case "/ready":
                ready, details = self._look()
                status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
                return status, {"status": "ready" if ready else "not ready", "uptime": uptime, **details}
        return HTTPStatus.NOT_FOUND, {"error": "not found: there are /health and /ready"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # A client that went away mid-answer is its own affair.


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0  # Seconds that a client may take.
    server: HealthServer

    def do_GET(self) -> None:
        self._send(*self.server.answer(self.path))

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET and HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _send(self, status: HTTPStatus, document: dict[str, Any]) -> None:
        body = msgspec.json.encode(document)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "taskharbor"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # A probe every second is not news.


def parse_address(text: str, *, public: bool = False) -> tuple[str, int]:
    """`8080`, `:8080`, `127.0.0.1:8080`, `[::1]:8080`. Others than this host only where `public` says so."""
    host, port = split_address(text, "health address", "127.0.0.1:8080 or 8080")
    if not public and not is_loopback(host):
        raise InvalidRequest(
            f"health address {text!r} can be reached from other hosts: say --health-public if that is meant"
        )
    return host, port


def split_address(text: str, what: str, examples: str) -> tuple[str, int]:
    """Return host and port of an address to listen at. Without a host it is on this one."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"{what} {text!r}: write it like {examples}")
    return host.strip("[]") or DEFAULT_HOST, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
