"""Scripts are made cheaper before they are sent, and mean the same."""

from __future__ import annotations

from importlib.resources import files

import pytest

import taskharbor.drivers.redis as package
from needing import REDIS_VERSIONS
from taskharbor.drivers.redis.scripts import script
from taskharbor.drivers.redis.tightening import tightened
from taskharbor_testkit.servers import shared_redis


def lines_of(source: str) -> list[str]:
    return [line for line in tightened(source).split("\n") if line]


def test_constants_and_keys_are_written_in_where_they_are_used() -> None:
    source = (
        "local done = KEYS[9]\nlocal A, TEXT = 60 * 60, '>I8, I4'\nreturn redis.call('ZADD', done, A, TEXT)"
    )
    assert lines_of(source) == ["return redis.call('ZADD', KEYS[9], (60 * 60), '>I8, I4')"]


def test_words_in_strings_fields_and_comments_are_left_alone() -> None:
    source = "local done = KEYS[9]\nlocal job = {}\nreturn job.done == 'done -- done' and done -- done"
    assert lines_of(source) == ["local job = {}", "return job.done == 'done -- done' and KEYS[9]"]


@pytest.mark.parametrize(
    "use",
    [
        "done = 5",
        "for done = 1, 2 do end",
        "for _, done in ipairs({}) do end",
        "local a, done = 1, 2",
        "local done",
        "local function f(a, done) return done end",
        "local f = function(done) return done end",
        "local t = {done = 1}",
        "a, done = 1, 2",
    ],
)
def test_what_is_given_another_meaning_somewhere_stays_a_variable(use: str) -> None:
    assert "local done = KEYS[9]" in tightened(f"local done = KEYS[9]\n{use}\nreturn done")


def test_names_declared_together_stay_together() -> None:
    assert "local A, B = 1, 2" in tightened("local A, B = 1, 2\nB = 3\nreturn A + B")


def test_functions_that_nobody_uses_are_left_out_with_those_only_they_use() -> None:
    source = """
local function inner(x) return x end
local function outer(x)
  if x then return outer(inner(x)) end
end
local function used() return 1 end
return used()
"""
    assert lines_of(source) == ["local function used() return 1 end", "return used()"]


def test_lines_keep_their_numbers() -> None:
    source = "-- a\nlocal A = 1\nlocal function unused()\n  return A\nend\n\nreturn A"
    assert tightened(source).split("\n") == ["", "", "", "", "", "", "return 1"]


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_every_script_of_the_driver_is_understood_by_the_server(version: str) -> None:
    server = shared_redis(version)
    for path in (files(package) / "lua").iterdir():
        one = script(path.name.removesuffix(".lua"))
        assert server.execute("SCRIPT", "LOAD", one.source).decode() == one.sha
