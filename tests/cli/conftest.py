"""A folder to stand in, a fresh store and the command, as a user would have them."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.cli_harness import Run
from taskharbor.cli.root import root
from taskharbor.client import Client
from taskharbor.drivers.memory import MemoryDriver

OPTIONS = inspect.signature(CliRunner).parameters.keys()
SEPARATE: dict[str, Any] = dict.fromkeys({"mix_stderr"} & OPTIONS, False)
"""click before 8.2 mixes stderr into stdout unless told otherwise."""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("TASKHARBOR_URL", "TASKHARBOR_APP", "TASKHARBOR_JSON", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """A worker command sets up the root logger; other tests want it as it was."""
    root = logging.getLogger()
    before, hook = root.level, threading.excepthook
    yield
    root.setLevel(before)
    root.handlers = [one for one in root.handlers if one.get_name() != "taskharbor-cli"]
    logging.captureWarnings(False)
    threading.excepthook = hook


@pytest.fixture
def run() -> Run:
    """Run a command line in this process; `code` is what it must exit with."""

    def run(*args: str, code: int = 0, **options: Any) -> Result:
        result = CliRunner(**SEPARATE).invoke(root, list(args), **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    return run


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store in this process, which the commands find by TASKHARBOR_URL."""
    monkeypatch.setenv("TASKHARBOR_URL", "memory://cli-test")
    yield "memory://cli-test"
    MemoryDriver.drop("cli-test")


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client
