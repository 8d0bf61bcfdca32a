"""What a URL may say, and how the driver says no."""

from __future__ import annotations

from typing import Any

import pytest

from taskharbor.drivers.redis.options import Address, parse_url
from taskharbor.errors import InvalidRequest

_PASSWORD = "s3cr3t"
_IPV6 = Address("::1", 7000)
_SENTINELS = (Address("one", 26379), Address("two", 5000))
_NODES = (Address("one", 7000), Address("two", 6379))
_REFUSED = """
postgresql://h/0 redis:/h redis+nothing://h rediss+unix:///s redis+unix://h/s redis+unix:///
redis://h:port/0 redis://h:70000/0 redis://h/first redis://h/-1 redis://h/0/1 redis://one,two
redis://user@h redis://h/0#part redis+sentinel://one,two redis+sentinel://one//0 redis+cluster://one/3
redis+cluster://one?db=3 redis://h?bogus=1 redis://h?prefix={x} redis://h?timeout=0 redis://h?timeout=soon
redis://h?notify=maybe redis://h?poll=99999 redis://h?wait_replicas=-1
redis://h?wait_replicas=1&wait_aof=1 redis://h?wait_replicas=1&wait_timeout=20 redis://h?eviction=please
redis://h?tls_ca=/ca.pem redis://h?tls_verify=off rediss://h?tls_cert=/c.pem rediss://h?tls_ca=
"""
_WITH_PASSWORD = [
    f"redis://user:{_PASSWORD}@h:port/0",
    f"redis://user:{_PASSWORD}@h?bogus=1",
    f"redis://user:{_PASSWORD}#@h",
    f"redis+sentinel://:{_PASSWORD}@one,two",
    f"redis+sentinel://one,two/jobs?sentinel_password={_PASSWORD}&bogus=1",
]


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("redis://", {"kind": "single", "addresses": (Address("localhost", 6379),), "db": 0}),
        ("redis://", {"prefix": "taskharbor:", "notify": True, "tls": False, "place": "localhost:6379/0"}),
        ("redis://", {"wait_replicas": 0, "wait_aof": None, "eviction": "refuse"}),
        ("redis://db.internal:7000/3", {"addresses": (Address("db.internal", 7000),), "db": 3}),
        (f"redis://us%40er:{_PASSWORD}%2F@h", {"user": "us@er", "password": f"{_PASSWORD}/"}),
        (f"redis://:{_PASSWORD}@host", {"user": None, "password": _PASSWORD}),
        ("redis://[::1]:7000/0", {"addresses": (_IPV6,), "place": "[::1]:7000/0"}),
        ("redis://[fe80::2]", {"addresses": (Address("fe80::2", 6379),)}),
        ("redis://h/2?prefix=app:&timeout=3&connect_timeout=2", {"prefix": "app:", "timeout": 3.0, "db": 2}),
        ("redis://h?notify=off&poll=0.25&connect_timeout=2", {"notify": False, "connect_timeout": 2.0}),
        ("redis://h?wait_replicas=2&wait_timeout=0.5", {"wait_replicas": 2, "wait_timeout": 0.5}),
        ("redis://h?wait_aof=0&eviction=accept", {"wait_aof": 0, "eviction": "accept"}),
        ("rediss://h?tls_ca=/ca.pem&tls_verify=off", {"tls": True, "tls_ca": "/ca.pem", "tls_verify": False}),
        ("rediss://h?tls_cert=/c.pem&tls_key=/k.pem", {"tls_cert": "/c.pem", "tls_key": "/k.pem"}),
        ("redis+sentinel://one,two:5000/jobs/4", {"kind": "sentinel", "addresses": _SENTINELS}),
        ("redis+sentinel://one,two:5000/jobs/4", {"service": "jobs", "db": 4}),
        ("redis+sentinel://one,two:5000/jobs/4", {"place": "one:26379,two:5000/jobs/4"}),
        ("redis+sentinel://:a@one/jobs?sentinel_password=b", {"password": "a", "sentinel_password": "b"}),
        ("rediss+sentinel://one/jobs", {"tls": True}),
        ("redis+cluster://one:7000,two", {"kind": "cluster", "addresses": _NODES}),
        ("rediss+cluster://one", {"tls": True}),
        ("redis+unix:///run/redis.sock?db=2", {"addresses": (Address("/run/redis.sock", 0),), "db": 2}),
    ],
)
def test_what_a_url_says_is_understood(url: str, fields: dict[str, Any]) -> None:
    options = parse_url(url)
    assert {name: getattr(options, name) for name in fields} == fields


@pytest.mark.parametrize("url", [*_REFUSED.split(), f"redis://h?prefix={'x' * 201}", *_WITH_PASSWORD])
def test_what_makes_no_sense_is_refused_without_a_word_of_the_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_url(url)
    assert _PASSWORD not in str(refusal.value)


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'prefx'.*prefix, db, timeout"):
        parse_url("redis://h?prefx=a")


def test_neither_the_place_nor_the_repr_tells_the_account() -> None:
    options = parse_url(f"redis://someone:{_PASSWORD}@h/1?sentinel_password={_PASSWORD}2")
    for text in (options.place, repr(options), str(options)):
        assert _PASSWORD not in text
        assert "someone" not in text
