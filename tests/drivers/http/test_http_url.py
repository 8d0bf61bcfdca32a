"""What a URL of a broker says, and what it must not say."""

from __future__ import annotations

import pytest

from taskharbor.drivers.http import HttpDriver
from taskharbor.drivers.http.broker_connections import TOKEN, parse_url
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest


@pytest.fixture(autouse=True)
def no_token_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.mark.parametrize(
    ("url", "bases"),
    [
        ("http://127.0.0.1:7433", ["http://127.0.0.1:7433"]),
        ("http://127.0.0.1:7433/", ["http://127.0.0.1:7433"]),
        ("https://jobs.example.com", ["https://jobs.example.com"]),
        ("https://jobs.example.com/queue/", ["https://jobs.example.com/queue"]),
        ("http://[::1]:7433", ["http://[::1]:7433"]),
        ("http://one:7433,two", ["http://one:7433", "http://two"]),
        ("https://t@one,two:1/p", ["https://one/p", "https://two:1/p"]),
    ],
)
def test_addresses_are_understood(url: str, bases: list[str]) -> None:
    driver = connect(url)
    assert isinstance(driver, HttpDriver)
    assert list(driver.options.bases) == bases


def test_a_token_comes_from_the_url_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_url("http://host").token is None
    assert parse_url("http://se%2Fcret@host").token == "se/cret"
    monkeypatch.setenv(TOKEN, "around")
    assert parse_url("http://host").token == "around"
    assert parse_url("http://own@host").token == "own"


def test_a_token_is_in_no_message() -> None:
    options = parse_url("https://canary@one,two?timeout=3")
    assert "canary" not in repr(options) + options.place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://", "cannot be understood"),
        ("http://host:0", "cannot be understood"),
        ("http://host:99999", "cannot be understood"),
        ("http://a,,b", "cannot be understood"),
        ("http://[::1", "cannot be understood"),
        ("ftp://host", "cannot be understood"),
        ("http://host?tiemout=3", "unknown option 'tiemout'.*timeout"),
        ("http://host?timeout=-1", "seconds between"),
        ("http://host?timeout=soon", "seconds between"),
        ("http://host?ca=/ca.pem", "https"),
        ("https://host?ca=", "give a value"),
        ("http://canary%20@host", "characters that no token has"),
        ("http://canary%0A@host", "characters that no token has"),
        ("https://canary@one:x", "cannot be understood"),
        ("https://canary:canary@one", "a token and no user"),
        ("https://canary@one?what=1", "unknown option 'what'"),
        ("https://canary@one#x", "no part after #"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as told:
        parse_url(url)
    assert "canary" not in str(told.value)
