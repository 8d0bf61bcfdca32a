from importlib.metadata import EntryPoint

import pytest

import taskharbor.drivers.registry as registry
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.errors import InvalidRequest, MissingExtra, UnknownDriver


def test_a_url_finds_its_driver() -> None:
    assert isinstance(registry.connect("memory://"), MemoryDriver)


def test_not_a_url() -> None:
    with pytest.raises(InvalidRequest, match="write it like sqlite"):
        registry.connect("jobs.db")


def test_an_unknown_scheme_lists_what_is_there() -> None:
    with pytest.raises(UnknownDriver, match=r"amqp://.*memory.*sqlite"):
        registry.connect("amqp://localhost")


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    point = EntryPoint("third", request.param, registry.GROUP)
    monkeypatch.setattr(registry, "installed_drivers", lambda: {"third": point})


@pytest.mark.parametrize("entry", ["taskharbor.drivers.memory:MemoryDriver"], indirect=True)
def test_a_third_partys_driver_plugs_in_by_entry_point(entry: None) -> None:
    with pytest.raises(InvalidRequest):  # It is ours underneath, and does not know this scheme.
        registry.connect("third://x?nonsense=1")


@pytest.mark.parametrize("entry", ["a_package_nobody_has:Driver"], indirect=True)
def test_missing_packages_name_the_install_line(entry: None) -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'taskharbor\[third\]'"):
        registry.connect("third://x")


@pytest.mark.parametrize("entry", ["taskharbor.jobs:JobState"], indirect=True)
def test_an_entry_point_that_is_no_driver(entry: None) -> None:
    with pytest.raises(UnknownDriver, match="not a Driver class"):
        registry.connect("third://x")
