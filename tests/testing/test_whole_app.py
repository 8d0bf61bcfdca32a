"""An app of several modules, with a lifespan and failure handlers, runs in tests as in a worker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from taskharbor import FailedJob, Harbor, JobState, current_job
from taskharbor.testing import (
    drain,
    drain_async,
    inline,
    memory_store,
    run_inline,
    run_inline_async,
)

seen: list[Any] = []
"""The traces that jobs and lifespans leave."""

tenant = ContextVar("tenant", default="nobody")


@contextlib.asynccontextmanager
async def pool() -> AsyncIterator[dict[str, Any]]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    seen.append("open")
    yield {"loop": loop, "jobs": 0}
    assert (loop, task) == (asyncio.get_running_loop(), asyncio.current_task())
    seen.append("close")


harbor = Harbor("memory://", lifespan=pool)
harbor.queue("paused", paused=True)


@harbor.job
async def use() -> None:
    state = current_job().state
    assert state["loop"] is asyncio.get_running_loop()
    state["jobs"] += 1
    seen.append(state["jobs"])


@harbor.job
def use_twice() -> None:
    current_job().state["jobs"] += 10
    use.enqueue()


@harbor.job
def tell_tenant() -> str:
    return tenant.get()


@harbor.job(max_attempts=1)
def die() -> None:
    raise ValueError("oops")


@harbor.on_failure
async def everywhere(failed: FailedJob) -> None:
    seen.append((failed.queue, failed.type))


@die.on_failure(max_attempts=2)
def at_second_try(failed: FailedJob) -> None:
    if current_job().attempt == 1:
        raise KeyError("not yet")
    seen.append("told")


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.mark.parametrize("run", ["drain", "inline", "run_inline"])
def test_modules_that_the_app_names_are_imported(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "named_app", app := type(sys)("named_app"))
    (tmp_path / f"for_{run}.py").write_text("import named_app\n@named_app.harbor.job\ndef late(): ...\n")
    app.harbor = shop = Harbor("memory://", imports=[f"for_{run}"])  # type: ignore[attr-defined]

    @shop.job
    def by_name() -> None:
        shop.enqueue("late")

    with memory_store(shop):
        if run == "run_inline":
            run_inline(by_name)
        elif run == "inline":
            with inline(shop):
                by_name.enqueue()
        else:
            by_name.enqueue()
            drain(shop).raise_errors()
    assert "late" in shop.handlers


def test_the_lifespan_is_entered_once_for_a_drain_and_for_each_single_run() -> None:
    with memory_store(harbor):
        use.enqueue_many([(), ()])
        drain(harbor).raise_errors()
        assert seen == ["open", 1, 2, "close"]
        seen.clear()
        run_inline(use)
        assert seen == ["open", 1, "close"]


def test_the_lifespan_is_entered_once_for_an_inline_block() -> None:
    with inline(harbor):
        use.enqueue()
        use.enqueue()
        tenant.set("ada")
        assert tell_tenant.enqueue().result() == "ada"
    assert seen == ["open", 1, 2, "close"]
    # The jobs of a plain handler run on another loop, where they get a value of their own.
    seen.clear()
    with inline(harbor):
        use_twice.enqueue()
        use.enqueue()
    assert seen == ["open", "open", 1, "close", 11, "close"]


def test_a_lifespan_that_fails_ends_the_run_before_any_job() -> None:
    def broken() -> contextlib.AbstractContextManager[None]:
        raise OSError("no database")

    shop = Harbor("memory://", lifespan=broken)
    job = shop.job(use.function)
    runs: list[Callable[[], Any]] = [
        lambda: drain(shop),
        lambda: run_inline(job),
        lambda: inline(shop).__enter__(),
    ]
    with memory_store(shop):
        handle = job.enqueue()
        for run in runs:
            with pytest.raises(OSError, match="no database"):
                run()
        assert handle.state() is JobState.READY


async def test_async_tests_have_the_lifespan_on_their_own_loop() -> None:
    with memory_store(harbor):
        await use.enqueue_async()
        (await drain_async(harbor)).raise_errors()
        await run_inline_async(use)
        assert seen == ["open", 1, "close"] * 2
        with inline(harbor):
            await use.enqueue_async()
            use.enqueue()


def test_failure_handlers_have_run_when_a_drain_returns() -> None:
    with memory_store(harbor):
        die.enqueue()
        die.options(queue="mail").enqueue()
        waiting = use.options(queue="paused").enqueue()
        assert drain(harbor, ["mail"], with_scheduled=True).dead == 1
        assert seen == ["open", ("mail", "die"), "told", "close"]
        seen.clear()
        report = drain(harbor)
        assert [str(error) for error in report.errors] == ["oops", "'not yet'"]
        assert seen == ["open", ("default", "die"), "close"]
        assert drain(harbor, with_scheduled=True).done == 1
        assert waiting.state() is JobState.READY  # The declared settings hold.


def test_failure_handlers_have_run_when_an_inline_enqueue_ends() -> None:
    with inline(harbor), pytest.raises(ValueError, match="oops"):
        die.options(queue="mail").enqueue()
    assert seen == ["open", ("mail", "die"), "close"]
    seen.clear()
    with inline(harbor, raise_errors=False):
        assert die.enqueue().state() is JobState.DEAD
    assert seen == ["open", ("default", "die"), "told", "close"]


def test_an_error_in_a_report_has_no_context_of_the_library() -> None:
    with memory_store(harbor):
        handle = die.enqueue()
        (error, *_) = drain(harbor).errors
        assert (error.__context__, error.__cause__) == (None, None)
        assert "During handling" not in str(handle.record().last_error)
