"""The architecture as a rule: who may import whom.

The core never imports a driver, a driver never imports another driver, and nothing that is an extra is imported outside its own
folder.
"""

import ast
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import taskharbor
import taskharbor_testkit

ROOT = Path(taskharbor.__file__).parent
ENGINE = "engine"
MEMORY = "memory"
FOLDER = ROOT / "drivers"
DRIVERS = sorted({path.parent.name for path in FOLDER.glob("*/__init__.py")} - {ENGINE} | {MEMORY})
SHARED = tuple(f"taskharbor.drivers.{path.stem}" for path in FOLDER.glob("*.py") if path.stem != MEMORY)
"""Drivers are folders, but for the memory driver; the modules beside them are for all, and the engine is for drivers."""
OUTER = ("broker", "cli", "testing", "demo", "lake", "spark")
"""Built on top of the core: nothing below may know of them."""
EXTRAS: dict[str, tuple[str, ...]] = {
    "hypothesis": (),
    "pytest": ("testing",),
    "taskharbor_testkit": ("cli",),
    **dict.fromkeys(("pyspark", "jinja2"), ("spark",)),
    "pandas": ("spark", "batch_jobs"),
    "pyarrow": ("lake", "spark", "bulk", "drivers", "batch_jobs"),
    **dict.fromkeys(("deltalake", "duckdb"), ("lake",)),
    "adbc_driver_postgresql": ("drivers",),
    **dict.fromkeys(("psycopg", "hiredis", "redis", "sqlalchemy", "django", "aiohttp"), ("drivers",)),
    **dict.fromkeys(("starlette", "uvicorn"), ("broker",)),
}


class Import(NamedTuple):
    module: str
    """Dotted, below the package."""
    top: str
    """The first folder or module below the package."""
    target: str


@cache
def imports(root: Path = ROOT) -> list[Import]:
    found: list[Import] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name, top = ".".join(relative.with_suffix("").parts), relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [Import(name, top, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found += [Import(name, top, target) for target in targets]
    return found


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_a_driver(target: str) -> bool:
    return target.startswith("taskharbor.drivers.") and not is_within(target, *SHARED)


def below(*packages: str) -> Callable[[str], bool]:
    return lambda target: is_within(target, *packages)


def named(*names: str) -> Callable[[str], bool]:
    return below(*(f"taskharbor.{name}" for name in names))


def inside(*folders: str) -> Callable[[Import], bool]:
    return lambda one: is_within(one.module, *folders)


def outside(*tops: str) -> Callable[[Import], bool]:
    return lambda one: one.top not in tops


ALL = [f"drivers.{driver}" for driver in DRIVERS]
RULES: dict[str, tuple[Callable[[Import], bool], Callable[[str], bool]]] = {
    "the core never imports a driver": (outside("drivers", *OUTER), is_a_driver),
    "the core knows nothing of what is built on it": (outside("__main__", *OUTER), named(*OUTER)),
    "the engine knows no driver": (inside(f"drivers.{ENGINE}"), named(*ALL)),
    "drivers know nothing of clients and workers": (
        inside("drivers"),
        named("client", "harbor", "worker", "handlers", "middleware", *OUTER),
    ),
    **{f"{one} imports no other driver": (inside(one), named(*{*ALL} - {one})) for one in ALL},
    **{f"{extra} stays in its folder": (outside(*tops), below(extra)) for extra, tops in EXTRAS.items()},
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_point_one_way(rule: str) -> None:
    is_bound, is_forbidden = RULES[rule]
    bound = [one for one in imports() if is_bound(one)]
    assert bound
    assert [one for one in bound if is_forbidden(one.target)] == []


def test_the_testkit_knows_no_driver() -> None:
    """Its model, planted bugs and simulation stand on the contract, and on the modules that all drivers share."""
    testkit = imports(Path(taskharbor_testkit.__file__).parent)
    assert [one for one in testkit if is_a_driver(one.target)] == []


def test_no_module_is_called_after_nothing() -> None:
    names = {path.stem for path in ROOT.rglob("*.py")} | {path.name for path in ROOT.rglob("*/")}
    assert names.isdisjoint({"utils", "common", "helpers", "misc"})


def test_a_class_name_stands_for_one_class() -> None:
    nodes = (node for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
