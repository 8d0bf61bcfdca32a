"""What a store or a report writes is readable by its owner only, whatever the umask of a usual account."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskharbor import Client, JobRequest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("url", ["sqlite:///{}/jobs.db", "file://{}/new/store"])
def test_a_new_store_is_its_owners(url: str, tmp_path: Path) -> None:
    with Client(url.format(tmp_path)) as client:
        client.enqueue(JobRequest(type="send", payload={"to": "ada"}))
        made = sorted(tmp_path.rglob("*"))
        assert made
        for path in made:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert not list(tmp_path.glob(".*"))


def test_the_mode_of_an_existing_database_stays(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    file.touch(0o640)
    Client(f"sqlite:///{file}").open().close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_report_is_its_owners_until_they_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pytest.importorskip("taskharbor.spark.report.page", exc_type=ImportError)
    monkeypatch.setattr(page, "render", lambda data: "a page")
    modes = []
    for change in (None, 0o644):
        if change is not None:
            (tmp_path / "report.html").chmod(change)
        modes.append(stat.S_IMODE(page.write_page(None, tmp_path / "report.html").stat().st_mode))
    assert modes == [0o600, 0o644]
    assert os.listdir(tmp_path) == ["report.html"]
