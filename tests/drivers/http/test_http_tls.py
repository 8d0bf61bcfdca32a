"""`https://`: encrypted, with a broker whose certificate is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from needing import Certificate
from taskharbor.drivers.http import HttpDriver
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.testing.broker import running_broker


@pytest.fixture(scope="module")
def url(certificate: Certificate) -> Iterator[str]:
    with running_broker("memory://", tls=(certificate.chain, certificate.key)) as url:
        assert url.startswith("https://")
        yield url


async def test_a_broker_that_is_vouched_for_is_talked_to(url: str, certificate: Certificate) -> None:
    async with HttpDriver.from_url(f"{url}?ca={certificate.authority}") as driver:
        assert await driver.time() > 0


def test_a_broker_that_nobody_vouches_for_is_refused(url: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"nobody vouches.*\?ca="):
        asyncio.run(HttpDriver.from_url(url).open())


def test_a_certificate_for_another_name_is_refused(url: str, certificate: Certificate) -> None:
    named = url.replace("127.0.0.1", "localhost")
    with pytest.raises(BackendUnavailable, match="vouches"):
        asyncio.run(HttpDriver.from_url(f"{named}?ca={certificate.authority}").open())


def test_tls_with_a_broker_that_has_none_is_said() -> None:
    with running_broker("memory://") as plain, pytest.raises(BackendUnavailable, match="http://"):
        asyncio.run(HttpDriver.from_url(plain.replace("http:", "https:")).open())


def test_no_tls_with_a_broker_that_wants_it_is_said(url: str) -> None:
    with pytest.raises(BackendUnavailable, match="no broker answers"):
        asyncio.run(HttpDriver.from_url(url.replace("https:", "http:")).open())


def test_a_file_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"ca=/missing\.pem"):
        asyncio.run(HttpDriver.from_url(f"{url}?ca=/missing.pem").open())
