import ast
import inspect
import subprocess
import sys
from pathlib import Path

import taskharbor
import taskharbor.testing as testing
from taskharbor.batch_jobs import Batch, BatchJobType
from taskharbor.codec import CodecRegistry
from taskharbor.handlers import JobOptions, Options
from taskharbor.harbor import Harbor
from taskharbor.transactions import AsyncClientWithin, AsyncJobWithin, ClientWithin, JobWithin


def test_every_public_name_can_be_had() -> None:
    assert [name for name in taskharbor.__all__ if not hasattr(taskharbor, name)] == []
    assert set(dir(taskharbor)) == set(taskharbor.__all__)
    assert not hasattr(taskharbor, "Harbour")


def test_type_checkers_see_what_python_gives() -> None:
    assert taskharbor.__file__ is not None
    tree = ast.parse(Path(taskharbor.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {(str(node.module), alias.asname) for node in imports for alias in node.names}
    assert seen == {(module, name) for name, module in taskharbor._HOME_OF.items()}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, taskharbor.testing.plugin; print('asyncio' in sys.modules, 'msgspec' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def _undocumented(name: str, value: object) -> list[str]:
    missing = [name] if not inspect.getdoc(value) else []
    if not inspect.isclass(value):
        return missing
    for member in dir(value):
        found = inspect.getattr_static(value, member)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if not member.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(function):
            missing.append(f"{name}.{member}")
    return missing


def test_public_names_have_docstrings() -> None:
    """So that an editor can show one."""
    exported = {name: getattr(taskharbor, name) for name in taskharbor.__all__}
    exported |= {name: getattr(testing, name) for name in testing.__all__}
    # What a user gets from them.
    got: tuple[type, ...] = (
        ClientWithin,
        AsyncClientWithin,
        JobWithin,
        AsyncJobWithin,
        CodecRegistry,
        BatchJobType,
        Batch,
    )
    exported |= {one.__name__: one for one in got}
    documented = [one for one in exported.items() if inspect.isclass(one[1]) or inspect.isfunction(one[1])]
    assert [missing for name, one in documented for missing in _undocumented(name, one)] == []


def test_help_names_every_option() -> None:
    for method, options in ((Harbor.job, JobOptions), (taskharbor.JobType.options, Options)):
        assert [one for one in options.__annotations__ if one not in str(inspect.getdoc(method))] == []
