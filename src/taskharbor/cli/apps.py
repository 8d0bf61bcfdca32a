"""Finds the app for `module:name`. If it is not there, the error names the apps that are."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from taskharbor.cli.problems import BadInput
from taskharbor.harbor import Harbor

USUAL_NAMES = ("harbor", "app")
_DECLARATION = re.compile(r"^(\w+)\s*(?::[^=]+)?=\s*(?:\w+\.)?Harbor\(", re.MULTILINE)


def load_app(reference: str) -> Harbor:
    """`jobs:harbor`, `package.jobs:harbor`, or `jobs` for its `harbor` or `app`. The current folder comes first."""
    put_current_folder_first()
    name, colon, attribute = reference.partition(":")
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        raise BadInput(
            f"{name!r} is a file; an app is named by its module", hint=f"try {dotted}{colon}{attribute}"
        )
    if not name or (colon and not attribute):
        raise BadInput(f"{reference!r}: write it like module:harbor", hint=_candidates_hint())
    module = _import(name)
    if colon:
        return _pick(module, attribute)
    for usual in USUAL_NAMES:
        if isinstance(getattr(module, usual, None), Harbor):
            return _pick(module, usual)
    apps = _apps_in(module)
    if len(apps) == 1:
        return _pick(module, apps[0])
    if apps:
        raise BadInput(f"{name} has several apps", hint=" or ".join(f"{name}:{one}" for one in apps))
    raise BadInput(f"{name} has no app: nothing in it is a Harbor", hint=_candidates_hint())


def put_current_folder_first() -> None:
    """Put the current folder first. `python -m` does so by itself, the console script does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise BadInput(
                f"no module named {missing.name!r} in {os.getcwd()}", hint=_candidates_hint()
            ) from missing
        raise _broken(name, missing) from missing
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> BadInput:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        return BadInput(f"importing {name} failed: {type(error).__name__}: {error.msg}{where}")
    return BadInput(
        f"importing {name} failed: {type(error).__name__}: {error}{where}", hint="--debug shows the traceback"
    )


def _pick(module: ModuleType, attribute: str) -> Harbor:
    found = getattr(module, attribute, None)
    if isinstance(found, Harbor):
        return found
    apps = _apps_in(module)
    hint = f"it has {', '.join(f'{module.__name__}:{one}' for one in apps)}" if apps else _candidates_hint()
    if found is None:
        raise BadInput(f"{module.__name__} has no {attribute!r}", hint=hint)
    raise BadInput(f"{module.__name__}:{attribute} is a {type(found).__name__}, not a Harbor", hint=hint)


def _apps_in(module: ModuleType) -> list[str]:
    return [
        name for name, value in vars(module).items() if isinstance(value, Harbor) and not name.startswith("_")
    ]


def _candidates_hint() -> str:
    """Return a hint with the apps in files nearby. The files are read, not imported."""
    found: list[str] = []
    for file in sorted([*Path().glob("*.py"), *Path().glob("[!._]*/*.py")])[:500]:
        try:
            text = file.read_text("utf-8", errors="replace")
        except OSError:
            continue
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        found += [f"{module}:{name}" for name in _DECLARATION.findall(text)]
    if not found:
        return "run it in your app's folder, with the module that says `harbor = Harbor(...)`"
    return f"apps found here: {', '.join(found[:8])}"
