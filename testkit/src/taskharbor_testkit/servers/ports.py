"""Ports for servers that are stopped and started again at the same address."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"

_RANGE = (15000, 30000)
"""Below what systems hand out to outgoing connections: one of those could take the port while its server is down."""

_random = random.SystemRandom()


def free_port() -> int:
    """Free a moment ago: whoever binds it is ready to try another."""
    for _ in range(200):
        port = _random.randrange(*_RANGE)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port was found on {HOST} between {_RANGE[0]} and {_RANGE[1]}")
