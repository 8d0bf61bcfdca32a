"""Durations and instants, both ways."""

from __future__ import annotations

import click
import pytest

from taskharbor import Client
from taskharbor.cli.options import duration, store_file
from taskharbor.cli.output import count_text, duration_text, relative_text
from taskharbor.drivers.registry import connect
from taskharbor.drivers.urls import shown_text, shown_url
from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.jobs import SECOND


def test_durations_as_people_write_them() -> None:
    seconds = {"90": 90.0, "1.5": 1.5, "500ms": 0.5, "10m": 600.0, "2h30m": 9000.0}
    seconds |= {"1d 2h": 93_600.0, "7D": 604_800.0, "1w": 604_800.0}
    assert {text: duration(text).total_seconds() for text in seconds} == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "10 minutes", "5x", "nan", "inf", "m", "200000000000"])
def test_no_durations(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration: write seconds"):
        duration(text)


def test_durations_and_instants_are_shown_in_two_units_at_most() -> None:
    shown = {0: "0 s", 12: "12 µs", 12_000: "12 ms", 999_700: "1.0 s", 1_400_000: "1.4 s", 59_990_000: "1 m"}
    shown |= {200 * SECOND: "3 m 20 s", 7500 * SECOND: "2 h 5 m", 4 * 86_400 * SECOND: "4 d"}
    shown |= {-3 * SECOND: "-3.0 s"}
    assert {us: duration_text(us) for us in shown} == shown
    relative = {0: "now", 20: "in 20 s", -20: "20 s ago", -200: "3 m ago", 90_000: "in 1 d"}
    assert {when: relative_text(when * SECOND, 0) for when in relative} == relative


def test_count_text_is_short() -> None:
    counts = (0, 9999, 10_000, 123_456, 1_000_000, 10_000_000, 2_000_000_000)
    assert [count_text(count) for count in counts] == ["0", "9999", "10.0k", "123k", "1.0M", "10.0M", "2.0G"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://me:secret@db:5432/x?poll=1", "postgres://***@db:5432/x?poll=1"),
        (
            "postgres://me:p%40ss@a:1,b:2/x?options=-c%20a=b&passfile=/f",
            "postgres://***@a:1,b:2/x?options=***&passfile=***",
        ),
        ("postgres://me:s/e@c@db/x?sslpassword=p&p%61ssword=p", "postgres://***@db/x?sslpassword=***&***"),
        ("redis://:s?e@db", "redis://***"),
        ("redis://db?s=e", "redis://db?s=***"),
        ("postgresql:/me:secret@db", "postgresql***"),
        (
            "redis+sentinel://u:p@a,b/s/0?sentinel_user=u&sentinel_password=p&db=1",
            "redis+sentinel://***@a,b/s/0?sentinel_user=***&sentinel_password=***&db=1",
        ),
        ("s3://b/p?session_token=t&endpoint=http://k:s@h", "s3://***"),
        ("az://b?endpoint=http://h&sas_key=%3Fsv=1", "az://b?endpoint=http://h&sas_key=***"),
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("file:///a@b/c?sync=off", "file:///a@b/c?sync=off"),
        ("https://t0ken@a:1,b:2", "https://***@a:1,b:2"),
        ("postgresql://u@h/x?password=p&schema=s", "postgresql://***@h/x?password=***&schema=s"),
        ("s3://b?endpoint=http%3A//k:s%40h&region=x", "s3://b?endpoint=***&region=x"),
        ("s3://b?endpoint=http://h?sig=s&poll=1", "s3://b?endpoint=***&poll=1"),
        ("gs://b?base_url=http://u:s@h&service_account=s", "gs://***"),
        ("gs://b?service_account=s", "gs://b?service_account=***"),
        ("redis://u:a/s@127.0.0.1:1", "redis://***@127.0.0.1:1"),
        ("redis://u:a?s=b@h", "redis://***"),
        ("http://a/s@h", "http://***@h"),
        ("sqlite://u:s@h/x.db", "sqlite://***@h/x.db"),
        ("host=h password=s", "***"),
        ("u:s@h", "u***"),
        ("s@h://x", "***"),
        ("postgres//u:s@h/d", "postgres***"),
        ("s3:/b:s@h", "s3***"),
        ("jobs.db", "jobs.db"),
        ("s3://b/p?access_key_id=A&secret_access_key=S", "s3://b/p?access_key_id=***&secret_access_key=***"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        *(
            f"{scheme}://me:hush@host/x?{{=hush"
            for scheme in ("sqlite", "memory", "s3", "redis", "http", "no")
        ),
        "redis://host?hush@",
        "postgresql:/me:hush@host",
        "postgresql://me:hush@hush@host/x",
        "redis://me:hush?hush@host",
        "http://a/hush@host:x",
        "postgresql://me:a/hush@host/x",
        "host=h password=hush",
        "u:hush@h",
        "u:hush@h?x=://",
        "postgres//u:hush@h/d",
        "s3:/b:hush@h",
    ],
)
def test_an_error_about_a_url_holds_no_secret(url: str) -> None:
    with pytest.raises(TaskHarborError) as error:
        connect(url)
    assert "hush" not in str(error.value)


def test_an_error_of_an_object_store_holds_no_secret() -> None:
    client = Client(
        "s3://b?endpoint=http://me:hush@127.0.0.1:1&allow_http=on&region=r&access_key_id=a&secret_access_key=hush"
    )
    with pytest.raises(BackendUnavailable) as error:
        client.stats()
    assert "http" in str(error.value)
    assert "hush" not in str(error.value)


def test_store_file() -> None:
    assert str(store_file("sqlite:///a%20b.db?durability=normal")) == "a b.db"
    assert str(store_file("sqlite:////abs/x.db")) == "/abs/x.db"
    assert store_file("memory://x") is None


def test_an_error_of_another_program_is_shown_without_secrets() -> None:
    text = "Error performing POST http://u:h'ush@127.0.0.1:9/b?sig=hush: refused (http://hush@h)"
    assert shown_text(text) == "Error performing POST http://***@127.0.0.1:9/b?sig=*** refused (http://***@h)"
