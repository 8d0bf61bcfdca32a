"""The architecture as a rule: who may import whom.

The core never imports a driver, a driver never imports another driver, and nothing that is an extra is imported outside its own
folder.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import taskharbor
import taskharbor_testkit

ROOT = Path(taskharbor.__file__).parent
ENGINE = "engine"
MEMORY = "memory"
DRIVERS = sorted(
    {path.parent.name for path in (ROOT / "drivers").glob("*/__init__.py")} - {ENGINE} | {MEMORY}
)
SHARED = tuple(
    f"taskharbor.drivers.{path.stem}" for path in (ROOT / "drivers").glob("*.py") if path.stem != MEMORY
)
"""Drivers are folders, but for the memory driver; the modules beside them are for all, and the engine is for drivers."""
OUTER = ("broker", "cli", "testing", "demo", "spark")
"""Built on top of the core: nothing below may know of them."""
EXTRAS = {
    "hypothesis": (),
    "pytest": ("testing",),
    "taskharbor_testkit": ("cli",),
    "pyspark": ("spark",),
    "jinja2": ("spark",),
    "pandas": ("spark", "batch_jobs"),
    "pyarrow": ("spark", "bulk", "drivers", "batch_jobs"),
    "adbc_driver_postgresql": ("drivers",),
    "psycopg": ("drivers",),
    "hiredis": ("drivers",),
    "redis": ("drivers",),
    "sqlalchemy": ("drivers",),
    "django": ("drivers",),
    "aiohttp": ("drivers",),
    "starlette": ("broker",),
    "uvicorn": ("broker",),
}


def modules(root: Path = ROOT) -> Iterator[tuple[str, str, list[str]]]:
    """(dotted name, first folder or module below the package, what it imports)"""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        imported: list[str] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        yield str(relative.with_suffix("")).replace("/", "."), relative.parts[0].removesuffix(".py"), imported


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_core_never_imports_a_driver() -> None:
    guilty = [
        f"{name} imports {target}"
        for name, top, imported in modules()
        if top not in ("drivers", *OUTER)
        for target in imported
        if is_within(target, "taskharbor.drivers")
        and target != "taskharbor.drivers"
        and not any(is_within(target, shared) for shared in SHARED)
    ]
    assert guilty == []


def test_a_driver_never_imports_another_driver() -> None:
    guilty = [
        f"{name} imports {target}"
        for name, top, imported in modules()
        if top == "drivers" and name.split(".")[1] in DRIVERS
        for target in imported
        for other in DRIVERS
        if other != name.split(".")[1] and is_within(target, f"taskharbor.drivers.{other}")
    ]
    assert guilty == []


def test_the_engine_knows_no_driver() -> None:
    guilty = [
        f"{name} imports {target}"
        for name, _, imported in modules()
        if name.startswith(f"drivers.{ENGINE}.")
        for target in imported
        if any(is_within(target, f"taskharbor.drivers.{driver}") for driver in DRIVERS)
    ]
    assert guilty == []


def test_drivers_know_nothing_of_clients_and_workers() -> None:
    upper = ("client", "harbor", "worker", "handlers", "middleware", *OUTER)
    guilty = [
        f"{name} imports {target}"
        for name, top, imported in modules()
        if top == "drivers"
        for target in imported
        if any(is_within(target, f"taskharbor.{module}") for module in upper)
    ]
    assert guilty == []


def test_the_core_knows_nothing_of_what_is_built_on_it() -> None:
    guilty = [
        f"{name} imports {target}"
        for name, top, imported in modules()
        if top not in OUTER and top not in ("__main__",)
        for target in imported
        if any(is_within(target, f"taskharbor.{module}") for module in OUTER)
    ]
    assert guilty == []


def test_extras_stay_in_their_own_folder() -> None:
    guilty = [
        f"{name} imports {target}"
        for name, top, imported in modules()
        for target in imported
        for extra, homes in EXTRAS.items()
        if is_within(target, extra) and top not in homes
    ]
    assert guilty == []


def test_only_the_history_command_imports_the_testkit() -> None:
    importers = {
        name
        for name, _, imported in modules()
        if any(is_within(target, "taskharbor_testkit") for target in imported)
    }
    assert importers == {"cli.pipeline"}


def test_the_testkit_knows_no_driver() -> None:
    """Its model, planted bugs and simulation stand on the contract, and on the modules that all drivers share."""
    guilty = [
        f"{name} imports {target}"
        for name, _, imported in modules(Path(taskharbor_testkit.__file__).parent)
        for target in imported
        if is_within(target, "taskharbor.drivers")
        and target != "taskharbor.drivers"
        and not any(is_within(target, shared) for shared in SHARED)
    ]
    assert guilty == []


def test_no_module_is_called_after_nothing() -> None:
    assert [
        name for name, _, _ in modules() if name.split(".")[-1] in ("utils", "common", "helpers", "misc")
    ] == []
