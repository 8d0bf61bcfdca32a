"""`rediss://`: encrypted, with a server whose certificate is checked."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_stage import COUNT, call, connected

from needing import need
from taskharbor.drivers.redis.connections import Connections
from taskharbor.drivers.redis.options import parse_url
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor_testkit.servers import RedisServer, ServerFailed
from taskharbor_testkit.servers.ports import free_port


@pytest.fixture(scope="module")
def certificate() -> Iterator[Path]:
    """A directory with `cert.pem`, which vouches for itself at 127.0.0.1, and `key.pem`. The server may be another account."""
    if shutil.which("openssl") is None:
        need("openssl, to make a certificate with")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", "/CN=harbor", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", place / "key.pem",
             "-out", place / "cert.pem"],
            check=True,
            capture_output=True,
        )  # fmt: skip
        (place / "key.pem").chmod(0o644)
        yield place


@pytest.fixture(scope="module")
def port(certificate: Path) -> Iterator[int]:
    port = free_port()
    config = {
        "tls-port": str(port),
        "tls-cert-file": str(certificate / "cert.pem"),
        "tls-key-file": str(certificate / "key.pem"),
        "tls-ca-cert-file": str(certificate / "cert.pem"),
        "tls-auth-clients": "optional",
    }
    try:
        server = RedisServer.start(config=config)
    except ServerFailed as error:
        need(f"a Redis server that was built with TLS: {str(error).splitlines()[0]}")
    with server:
        yield port


def test_a_server_whose_certificate_is_vouched_for_is_talked_to(certificate: Path, port: int) -> None:
    async def use() -> None:
        async with connected(f"rediss://127.0.0.1:{port}/0?tls_ca={certificate}/cert.pem") as connections:
            assert await connections.run(call(COUNT, "ca", 1)) == [1]
        own = f"tls_cert={certificate}/cert.pem&tls_key={certificate}/key.pem"
        async with connected(
            f"rediss://127.0.0.1:{port}/0?tls_ca={certificate}/cert.pem&{own}"
        ) as connections:
            assert await connections.run(call(COUNT, "ca", 1)) == [2]

    asyncio.run(use())


def test_a_server_that_nobody_vouches_for_is_refused_unless_that_is_wanted(port: int) -> None:
    async def use() -> None:
        with pytest.raises(BackendUnavailable, match="tls_ca"):
            await Connections(parse_url(f"rediss://127.0.0.1:{port}/0")).open()
        async with connected(f"rediss://127.0.0.1:{port}/0?tls_verify=off") as connections:
            assert await connections.run(call(COUNT, "off", 1)) == [1]

    asyncio.run(use())


def test_a_certificate_for_another_name_is_refused(certificate: Path, port: int) -> None:
    async def use() -> None:
        with pytest.raises(BackendUnavailable, match="certificate"):
            await Connections(parse_url(f"rediss://localhost:{port}/0?tls_ca={certificate}/cert.pem")).open()

    asyncio.run(use())


def test_tls_with_a_server_that_has_none_is_said() -> None:
    async def use() -> None:
        with RedisServer.start() as plain:
            url = plain.url.replace("redis://", "rediss://") + "?connect_timeout=1"
            # Redis says nothing to what it does not understand, or closes the connection.
            with pytest.raises(
                BackendUnavailable, match=r"no connection within|instead of rediss|closed|reset"
            ):
                await Connections(parse_url(url)).open()

    asyncio.run(use())


def test_files_that_are_not_there_are_named(port: int) -> None:
    async def use() -> None:
        with pytest.raises(InvalidRequest, match=r"tls_ca.*missing\.pem"):
            await Connections(parse_url(f"rediss://127.0.0.1:{port}/0?tls_ca=/missing.pem")).open()

    asyncio.run(use())
