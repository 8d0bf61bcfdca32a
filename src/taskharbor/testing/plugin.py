"""The pytest plugin: fixtures for apps that use TaskHarbor, loaded by entry point in every pytest run.

    [tool.pytest.ini_options]
    taskharbor_app = "myapp.jobs:harbor"

    def test_signup(taskharbor_testing):
        sign_up("ada@example.org")
        taskharbor_testing.assert_enqueued(send_mail, args={"to": "ada@example.org"})
        assert taskharbor_testing.drain().done == 1

Nothing of TaskHarbor is imported before a test asks for one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from taskharbor.clock import Clock, FakeClock
    from taskharbor.harbor import Harbor
    from taskharbor.testing.inlining import HarborTesting

INI = "taskharbor_app"


class UseMemory(Protocol):
    """The type of the fixture `taskharbor_memory`."""

    def __call__(self, harbor: Harbor, *, clock: Clock | None = None) -> HarborTesting:
        """Put an app on a private memory store until the test is over."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the setting that names the app."""
    parser.addini(INI, "the TaskHarbor app that taskharbor_testing works on, as module:name")


@pytest.fixture
def taskharbor_clock() -> FakeClock:
    """The clock of apps under test. It stands still: `taskharbor_clock.advance(60)`."""
    from taskharbor.clock import FakeClock, SystemClock

    return FakeClock(SystemClock().now())


@pytest.fixture
def taskharbor_memory(taskharbor_clock: FakeClock) -> Iterator[UseMemory]:
    """`taskharbor_memory(harbor)` gives any app a private store for this test, on the test's fake clock."""
    from taskharbor.testing.inlining import HarborTesting, memory_store

    with ExitStack() as stack:

        def use_memory(harbor: Harbor, *, clock: Clock | None = None) -> HarborTesting:
            return HarborTesting(stack.enter_context(memory_store(harbor, clock=clock or taskharbor_clock)))

        yield use_memory


@pytest.fixture
def taskharbor_app(request: pytest.FixtureRequest) -> Harbor:
    """The app under test: named in pytest's configuration, or override this fixture in a conftest.py."""
    name = str(request.config.getini(INI))
    if not name:
        pytest.fail(
            f'which app? Set {INI} = "module:name" in pytest\'s configuration, '
            "or define a fixture taskharbor_app that returns it",
            pytrace=False,
        )
    from taskharbor.cli.app_loading import load_app

    return load_app(name)


@pytest.fixture
def taskharbor_testing(taskharbor_app: Harbor, taskharbor_memory: UseMemory) -> HarborTesting:
    """The app on a private store, with all test functions as methods."""
    return taskharbor_memory(taskharbor_app)
