"""`rediss://`: encrypted, with a server whose certificate is checked. A proxy speaks TLS for a server that need not."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from drivers.redis.redis_stage import COUNT, call, connected, refused
from needing import Certificate
from taskharbor_testkit.servers import FaultProxy, shared_redis, with_fresh_prefix


def tls_of(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate.authority)
    context.load_cert_chain(certificate.chain, certificate.key)
    return context


@pytest.fixture(scope="module")
def proxy(certificate: Certificate) -> Iterator[FaultProxy]:
    with FaultProxy.to(shared_redis().url, tls=tls_of(certificate)) as proxy:
        yield proxy


@pytest.fixture
def url(proxy: FaultProxy) -> str:
    return proxy.url_for(with_fresh_prefix(shared_redis().url))


async def test_a_server_whose_certificate_is_vouched_for_is_talked_to(
    url: str, certificate: Certificate, proxy: FaultProxy
) -> None:
    assert url.startswith("rediss://127.0.0.1:")
    async with connected(url, f"&tls_ca={certificate.authority}") as connections:
        key = f"{connections.prefix}n"
        assert await connections.run(call(COUNT, key, 1)) == [1]
        # An answer that is lost is asked for again.
        proxy.on_request(key.encode(), "lose_answer")
        assert await connections.run(call(COUNT, key, 1)) == [3]
        assert proxy.triggered.is_set()


async def test_a_server_that_wants_to_know_its_clients_is_shown_a_certificate(
    certificate: Certificate,
) -> None:
    strict = tls_of(certificate)
    strict.verify_mode = ssl.CERT_REQUIRED
    with FaultProxy.to(shared_redis().url, tls=strict) as proxy:
        url = f"{proxy.url_for(shared_redis().url)}?tls_ca={certificate.authority}"
        async with connected(url, f"&tls_cert={certificate.chain}&tls_key={certificate.key}"):
            pass
        assert await refused(url)


async def test_a_server_that_nobody_vouches_for_is_refused_unless_that_is_wanted(
    url: str, certificate: Certificate
) -> None:
    assert "tls_ca" in await refused(url)
    elsewhere = url.replace("127.0.0.1", "localhost")
    assert "certificate" in await refused(f"{elsewhere}&tls_ca={certificate.authority}")
    async with connected(f"{url}&tls_verify=off"):
        pass


async def test_tls_with_a_server_that_has_none_is_said() -> None:
    # Redis says nothing to what it does not understand, or closes the connection.
    why = await refused(shared_redis().url.replace("redis://", "rediss://") + "?connect_timeout=0.3")
    assert any(words in why for words in ("no connection within", "instead of rediss", "closed", "reset"))


async def test_files_that_are_not_there_are_named(url: str) -> None:
    why = await refused(f"{url}&tls_ca=/missing.pem")
    assert "tls_ca" in why
    assert "missing.pem" in why
