"""`rediss://`: encrypted, with a server whose certificate is checked. A proxy speaks TLS for a server that need not."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from drivers.redis.redis_stage import COUNT, call, connected
from needing import Certificate
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import Store
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor_testkit.servers import FaultProxy, RedisServer


def tls_of(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate.authority)
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: RedisServer, certificate: Certificate) -> Iterator[str]:
    with FaultProxy.to(server.url, tls=tls_of(certificate)) as proxy:
        yield proxy.url_for(server.url)


async def test_a_server_whose_certificate_is_vouched_for_is_talked_to(
    url: str, certificate: Certificate
) -> None:
    assert url.startswith("rediss://127.0.0.1:")
    async with connected(f"{url}?tls_ca={certificate.authority}") as connections:
        assert await connections.run(call(COUNT, "ca", 1)) == [1]


async def test_a_server_that_wants_to_know_its_clients_is_shown_a_certificate(
    server: RedisServer, certificate: Certificate
) -> None:
    strict = tls_of(certificate)
    strict.verify_mode = ssl.CERT_REQUIRED

    with FaultProxy.to(server.url, tls=strict) as proxy:
        url = f"{proxy.url_for(server.url)}?tls_ca={certificate.authority}"
        own = f"tls_cert={certificate.chain}&tls_key={certificate.key}"
        async with connected(f"{url}&{own}") as connections:
            assert await connections.run(call(COUNT, "own", 1)) == [1]
        with pytest.raises(BackendUnavailable):
            await Store(parse_url(url)).open()


async def test_an_answer_that_is_lost_over_tls_is_asked_for_again(
    server: RedisServer, certificate: Certificate
) -> None:
    with FaultProxy.to(server.url, tls=tls_of(certificate)) as proxy:
        url = f"{proxy.url_for(server.url)}?tls_ca={certificate.authority}"
        async with connected(url) as connections:
            assert await connections.run(call(COUNT, "lost", 1)) == [1]
            proxy.on_request(b"lost", "lose_answer")
            assert await connections.run(call(COUNT, "lost", 1)) == [3]
            assert proxy.triggered.is_set()


async def test_a_server_that_nobody_vouches_for_is_refused_unless_that_is_wanted(url: str) -> None:
    with pytest.raises(BackendUnavailable, match="tls_ca"):
        await Store(parse_url(url)).open()
    async with connected(f"{url}?tls_verify=off") as connections:
        assert await connections.run(call(COUNT, "off", 1)) == [1]


async def test_a_certificate_for_another_name_is_refused(url: str, certificate: Certificate) -> None:
    elsewhere = url.replace("127.0.0.1", "localhost")
    with pytest.raises(BackendUnavailable, match="certificate"):
        await Store(parse_url(f"{elsewhere}?tls_ca={certificate.authority}")).open()


async def test_tls_with_a_server_that_has_none_is_said(server: RedisServer) -> None:
    url = server.url.replace("redis://", "rediss://") + "?connect_timeout=1"
    # Redis says nothing to what it does not understand, or closes the connection.
    with pytest.raises(BackendUnavailable, match=r"no connection within|instead of rediss|closed|reset"):
        await Store(parse_url(url)).open()


async def test_files_that_are_not_there_are_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tls_ca.*missing\.pem"):
        await Store(parse_url(f"{url}?tls_ca=/missing.pem")).open()
