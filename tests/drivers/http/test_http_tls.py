"""`https://`: encrypted, with a broker whose certificate is checked."""

from __future__ import annotations

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


async def test_a_broker_is_vouched_for_by_a_file_that_can_be_read(url: str, certificate: Certificate) -> None:
    async with HttpDriver.from_url(f"{url}?ca={certificate.authority}") as driver:
        assert await driver.time() > 0
    with pytest.raises(InvalidRequest, match=r"ca=/missing\.pem"):
        await HttpDriver.from_url(f"{url}?ca=/missing.pem").open()


@pytest.mark.parametrize(
    ("change", "by", "says"),
    [
        ("", "", r"nobody vouches.*\?ca="),
        ("127.0.0.1", "localhost", "vouches"),
        ("https:", "http:", "no broker answers"),
    ],
    ids=["no authority", "a certificate for another name", "no TLS where it is wanted"],
)
async def test_others_are_refused(
    url: str, certificate: Certificate, change: str, by: str, says: str
) -> None:
    ca = f"?ca={certificate.authority}" if by == "localhost" else ""
    with pytest.raises(BackendUnavailable, match=says):
        await HttpDriver.from_url(url.replace(change, by) + ca).open()


async def test_tls_with_a_broker_that_has_none_is_said() -> None:
    with running_broker("memory://") as plain, pytest.raises(BackendUnavailable, match="http://"):
        await HttpDriver.from_url(plain.replace("http:", "https:")).open()
