"""What a URL may say, and how the driver says no."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from taskharbor.drivers.registry import connect
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.drivers.sqlite.file import parse_url
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError


def test_three_slashes_are_relative_and_four_absolute() -> None:
    assert parse_url("sqlite:///jobs.db").path == Path("jobs.db")
    options = parse_url("sqlite:////tmp/a%20b%3F.db?durability=normal&busy_timeout=2.5")
    assert (options.path, options.durability, options.busy_timeout) == (Path("/tmp/a b?.db"), "normal", 2.5)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://host/jobs.db",
        "sqlite:///jobs.db?mode=ro",
        "sqlite:///jobs.db?durability=off",
        "sqlite:///jobs.db?busy_timeout=soon",
        "sqlite:///jobs.db?busy_timeout=-1",
        "sqlite:///folder/",
        "postgres:///jobs.db",
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(url: str) -> None:
    with pytest.raises(InvalidRequest, match="memory://" if "memory" in url else None):
        parse_url(url)


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    driver = connect(f"sqlite:///{tmp_path}/nowhere/jobs.db")
    with pytest.raises(BackendUnavailable, match="nowhere does not exist"):
        await driver.open()


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear database, " * 500)
    with pytest.raises(TaskHarborError, match="not an SQLite database"):
        await connect(f"sqlite:///{path}").open()
    assert path.read_text() == "Dear database, " * 500


@pytest.mark.parametrize("name", ["späße.db", "it's.db", 'say "hi".db', "100%.db", "a?b#c.db", "日本.db"])
async def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    async with connect(f"sqlite:///{quote(str(tmp_path / name))}") as driver:
        assert await driver.stats(now=0) == []
    assert (tmp_path / name).exists()


async def test_a_driver_that_is_not_open_says_so(driver: SQLiteDriver) -> None:
    with pytest.raises(BackendUnavailable, match="open"):
        await driver.stats(now=0)
