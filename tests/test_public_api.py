import ast
import subprocess
import sys
from pathlib import Path

import taskharbor


def test_every_public_name_can_be_had() -> None:
    assert [name for name in taskharbor.__all__ if not hasattr(taskharbor, name)] == []
    assert set(dir(taskharbor)) == set(taskharbor.__all__)
    assert not hasattr(taskharbor, "Harbour")


def test_type_checkers_see_what_python_gives() -> None:
    assert taskharbor.__file__ is not None
    tree = ast.parse(Path(taskharbor.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (str(node.module), alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in taskharbor._HOME_OF.items()}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, taskharbor.testing.plugin; print('asyncio' in sys.modules, 'msgspec' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
