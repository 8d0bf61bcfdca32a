"""What a URL may say, and how the driver says no."""

from __future__ import annotations

import pytest

from taskharbor.drivers.redis.options import Address, parse_url
from taskharbor.errors import InvalidRequest

_PASSWORD = "s3cr3t"


def test_a_bare_url_has_the_defaults() -> None:
    options = parse_url("redis://")
    assert (options.kind, options.addresses, options.db) == ("single", (Address("localhost", 6379),), 0)
    assert (options.prefix, options.notify, options.tls) == ("", True, False)
    assert (options.wait_replicas, options.wait_aof, options.eviction) == (0, None, "refuse")
    assert options.place == "localhost:6379/0"


def test_host_port_database_and_account_are_read() -> None:
    options = parse_url(f"redis://us%40er:{_PASSWORD}%2F@db.internal:7000/3")
    assert (options.addresses, options.db) == ((Address("db.internal", 7000),), 3)
    assert (options.user, options.password) == ("us@er", f"{_PASSWORD}/")


def test_a_password_needs_no_user() -> None:
    options = parse_url(f"redis://:{_PASSWORD}@host")
    assert (options.user, options.password) == (None, _PASSWORD)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert parse_url("redis://[::1]:7000/0").addresses == (Address("::1", 7000),)
    assert parse_url("redis://[fe80::2]").addresses == (Address("fe80::2", 6379),)
    assert parse_url("redis://[::1]:7000/0").place == "[::1]:7000/0"


def test_own_options_are_understood() -> None:
    options = parse_url(
        "redis://h/2?prefix=app:&timeout=3&connect_timeout=2&notify=off&poll=0.25&wait_replicas=2"
        "&wait_timeout=0.5&eviction=accept"
    )
    assert (options.prefix, options.timeout, options.connect_timeout) == ("app:", 3.0, 2.0)
    assert (options.notify, options.poll, options.wait_replicas) == (False, 0.25, 2)
    assert (options.wait_timeout, options.eviction, options.db) == (0.5, "accept", 2)
    assert parse_url("redis://h?wait_aof=0").wait_aof == 0


def test_tls_is_asked_for_by_the_scheme() -> None:
    options = parse_url("rediss://h?tls_ca=/ca.pem&tls_cert=/c.pem&tls_key=/k.pem&tls_verify=off")
    assert options.tls
    assert (options.tls_ca, options.tls_cert, options.tls_key) == ("/ca.pem", "/c.pem", "/k.pem")
    assert not options.tls_verify


def test_sentinels_come_with_the_name_of_the_service() -> None:
    options = parse_url(f"redis+sentinel://:{_PASSWORD}@one,two:5000/jobs/4?sentinel_password=other")
    assert options.kind == "sentinel"
    assert options.addresses == (Address("one", 26379), Address("two", 5000))
    assert (options.service, options.db, options.sentinel_password) == ("jobs", 4, "other")
    assert options.place == "one:26379,two:5000/jobs/4"
    assert parse_url("rediss+sentinel://one/jobs").tls


def test_a_cluster_names_some_of_its_nodes() -> None:
    options = parse_url("redis+cluster://one:7000,two")
    assert (options.kind, options.addresses) == ("cluster", (Address("one", 7000), Address("two", 6379)))
    assert parse_url("rediss+cluster://one").tls


def test_a_socket_is_named_by_its_path() -> None:
    options = parse_url("redis+unix:///run/redis.sock?db=2")
    assert (options.kind, options.addresses, options.db) == ("unix", (Address("/run/redis.sock", 0),), 2)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/0",
        "redis:/h",
        "redis+nothing://h",
        "rediss+unix:///s",
        "redis+unix://h/s",
        "redis+unix:///",
        "redis://h:port/0",
        "redis://h:70000/0",
        "redis://h/first",
        "redis://h/-1",
        "redis://h/0/1",
        "redis://one,two",
        "redis://user@h",
        "redis://h/0#part",
        "redis+sentinel://one,two",
        "redis+sentinel://one//0",
        "redis+cluster://one/3",
        "redis+cluster://one?db=3",
        "redis://h?bogus=1",
        "redis://h?prefix={x}",
        f"redis://h?prefix={'x' * 201}",
        "redis://h?timeout=0",
        "redis://h?timeout=soon",
        "redis://h?notify=maybe",
        "redis://h?poll=99999",
        "redis://h?wait_replicas=-1",
        "redis://h?wait_replicas=1&wait_aof=1",
        "redis://h?wait_replicas=1&wait_timeout=20",
        "redis://h?eviction=please",
        "redis://h?tls_ca=/ca.pem",
        "redis://h?tls_verify=off",
        "rediss://h?tls_cert=/c.pem",
        "rediss://h?tls_ca=",
    ],
)
def test_what_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{_PASSWORD}@h:port/0",
        f"redis://user:{_PASSWORD}@h?bogus=1",
        f"redis://user:{_PASSWORD}#@h",
        f"redis+sentinel://:{_PASSWORD}@one,two",
        f"redis+sentinel://one,two/jobs?sentinel_password={_PASSWORD}&bogus=1",
    ],
)
def test_no_refusal_tells_the_password(url: str) -> None:
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
