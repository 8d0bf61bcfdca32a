"""Finds the app for `module:name`. If it is not there, the error names the apps that are."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from taskharbor.cli.errors import BadInput
from taskharbor.harbor import Harbor

USUAL_NAMES = ("harbor", "app")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DECLARATION = re.compile(r"^(\w+)\s*(?::[^=]+)?=\s*(?:\w+\.)?Harbor\(", re.MULTILINE)


def load_app(reference: str, *modules: str) -> Harbor:
    """Import an app, the modules that it names and these.

    An app is `jobs:harbor`, `package.jobs:harbor`, or `jobs` for its `harbor` or `app`. The current folder comes first.
    """
    put_current_folder_first()
    name, colon, attribute = reference.partition(":")
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        hint = f"try {dotted}{colon}{attribute}"
        raise BadInput(f"{name!r} is a file; an app is named by its module", hint=hint)
    if not name or (colon and not attribute):
        raise BadInput(f"{reference!r}: write it like module:harbor", hint=apps_nearby())
    module = _import(name)
    apps = [one for one, value in vars(module).items() if isinstance(value, Harbor) and one[0] != "_"]
    if not colon:
        usual = [one for one in USUAL_NAMES if one in apps] or apps
        if not usual:
            raise BadInput(f"{name} has no app: nothing in it is a Harbor", hint=apps_nearby())
        if len(usual) > 1 and usual[0] not in USUAL_NAMES:
            raise BadInput(f"{name} has several apps", hint=" or ".join(f"{name}:{one}" for one in apps))
        attribute = usual[0]
    found = getattr(module, attribute, None)
    if isinstance(found, Harbor):
        for one in modules:
            _import(one)
        try:
            found.load()
        except Exception as error:
            raise _broken(f"a module of {reference}", error) from error
        return found
    useful = [one for one in apps if vars(module)[one].handlers] or apps  # An app without jobs is no help.
    hint = f"it has {', '.join(f'{name}:{one}' for one in useful)}" if apps else apps_nearby()
    if found is None:
        raise BadInput(f"{name} has no {attribute!r}", hint=hint)
    raise BadInput(f"{name}:{attribute} is a {type(found).__name__}, not a Harbor", hint=hint)


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
            said = f"no module named {missing.name!r} in {os.getcwd()}"
            raise BadInput(said, hint=apps_nearby()) from missing
        raise _broken(name, missing) from missing
    except Exception as error:
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> BadInput:
    if isinstance(error, SyntaxError):
        said, hint, where = error.msg, "", f" ({error.filename}, line {error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            frame for frame in frames if "importlib" not in frame.filename and _PACKAGE not in frame.filename
        ]
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        said, hint = "; ".join([str(error), *getattr(error, "__notes__", ())]), "--debug shows the traceback"
    return BadInput(f"importing {name} failed: {type(error).__name__}: {said}{where}", hint=hint)


def apps_nearby() -> str:
    """Return a hint with the apps in files nearby. The files are read, not imported."""
    found: list[str] = []
    for file in sorted([*Path().glob("*.py"), *Path().glob("[!._]*/*.py")])[:500]:
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        with suppress(OSError):
            names = _DECLARATION.findall(file.read_text("utf-8", errors="replace"))
            found += [f"{module}:{name}" for name in names]
    if not found:
        return "run it in your app's folder, with the module that says `harbor = Harbor(...)`"
    return f"apps found here: {', '.join(found[:8])}"
