from importlib.metadata import EntryPoint

import pytest

import taskharbor.drivers.registry as registry
from taskharbor.errors import InvalidRequest, MissingExtra, UnknownDriver


def test_what_is_no_url_says_how_to_write_one_and_an_unknown_scheme_lists_what_is_there() -> None:
    with pytest.raises(InvalidRequest, match="write it like sqlite"):
        registry.connect("jobs.db")
    with pytest.raises(UnknownDriver, match=r"amqp://.*memory.*sqlite"):
        registry.connect("amqp://localhost")


@pytest.mark.parametrize(
    ("target", "error", "complaint"),
    [
        # It is ours underneath, and does not know this scheme.
        ("taskharbor.drivers.memory:MemoryDriver", InvalidRequest, "."),
        ("a_package_nobody_has:Driver", MissingExtra, r"pip install 'taskharbor\[third\]'"),
        ("taskharbor.jobs:JobState", UnknownDriver, "not a Driver class"),
    ],
)
def test_a_third_partys_driver_plugs_in_by_entry_point(
    target: str, error: type[Exception], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("third", target, registry.GROUP)
    monkeypatch.setattr(registry, "installed_drivers", lambda: {"third": point})
    with pytest.raises(error, match=complaint):
        registry.connect("third://x?nonsense=1")
