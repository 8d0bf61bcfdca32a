"""The pytest plugin, as a user's test suite meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

APP = """
from taskharbor import Harbor

harbor = Harbor("memory://production")

@harbor.job(max_attempts=2)
def add(a: int, b: int) -> int:
    if a < 0:
        raise ValueError("negative")
    return a + b
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(shop_jobs=APP)
    pytester.makeini("[pytest]\ntaskharbor_app = shop_jobs:harbor\nfilterwarnings = error")
    pytester.syspathinsert()
    return pytester


CONFIGURED = """
import asyncio
import pytest
from shop_jobs import add, harbor

@pytest.mark.parametrize("time", [1, 2])
def test_every_test_starts_empty(taskharbor_testing, time):
    assert taskharbor_testing.harbor is harbor
    taskharbor_testing.refute_enqueued()
    handle = add.enqueue(1, 2)
    taskharbor_testing.assert_enqueued(add, args={"a": 1}, count=1)
    assert len(taskharbor_testing.enqueued(add)) == 1
    assert taskharbor_testing.drain().done == 1
    assert handle.result() == 3

def test_time_is_the_tests(taskharbor_testing, taskharbor_clock):
    add.options(delay=60).enqueue(1, 2)
    assert taskharbor_testing.drain().total == 0
    taskharbor_testing.advance(60)
    assert taskharbor_testing.drain().done == 1
    assert taskharbor_testing.clock is taskharbor_clock

def test_inline_and_async_code(taskharbor_testing):
    with taskharbor_testing.inline():
        assert add.enqueue(2, 2).result() == 4
        with pytest.raises(ValueError, match="negative"):
            add.enqueue(-1, 0)
    taskharbor_testing.assert_enqueued(add, count=2)
    report = asyncio.run(taskharbor_testing.drain_async(with_scheduled=True))
    assert (report.retried, report.dead) == (0, 1)

def test_production_was_left_alone():
    assert harbor.client.list_jobs().jobs == []
"""
OWN = """
import pytest
from taskharbor import Harbor

@pytest.fixture
def taskharbor_app():
    return Harbor("memory://", queue="of-my-own")

def test_two_apps(taskharbor_memory, taskharbor_clock):
    one, two = Harbor("memory://"), Harbor("memory://")
    first, second = taskharbor_memory(one), taskharbor_memory(two)
    one.enqueue("note")
    first.assert_enqueued("note")
    assert second.enqueued("note") == []
    assert first.clock is second.clock is taskharbor_clock

def test_an_app_of_a_fixture(taskharbor_testing):
    taskharbor_testing.harbor.enqueue("note")
    taskharbor_testing.assert_enqueued(queue="of-my-own")
"""


@pytest.mark.parametrize(("tests", "passed"), [(CONFIGURED, 5), (OWN, 2)], ids=["configured", "of a fixture"])
def test_an_app_is_on_a_private_store(suite: pytest.Pytester, tests: str, passed: int) -> None:
    suite.makepyfile(tests)
    suite.runpytest_inprocess("-q", "-p", "no:xdist").assert_outcomes(passed=passed)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("", "*which app? Set taskharbor_app*"),
        ("shop_jobs:", "*'shop_jobs:': write it like module:harbor*"),
        ("shop_jobs:add", "*is a SyncJobType, not a Harbor*"),
    ],
)
def test_a_missing_app_is_explained(suite: pytest.Pytester, setting: str, complaint: str) -> None:
    suite.makeini(f"[pytest]\ntaskharbor_app = {setting}")
    suite.makepyfile("def test_it(taskharbor_testing): ...")
    result = suite.runpytest_inprocess("-q", "-p", "no:xdist")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([complaint])


PLUGIN = ("plugin", ["taskharbor.testing.inlining", "taskharbor.drivers.memory", "taskharbor_testkit"])


@pytest.mark.parametrize(("module", "unwanted"), [PLUGIN, ("inlining", ["pytest", "taskharbor_testkit"])])
def test_imports_stay_where_they_are_needed(module: str, unwanted: list[str]) -> None:
    program = f"import sys, taskharbor.testing.{module}; assert sys.modules.keys().isdisjoint({unwanted})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_name_the_package_promises_is_there() -> None:
    import taskharbor.testing as testing

    for name in testing.__all__:
        assert getattr(testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018
