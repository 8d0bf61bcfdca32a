"""Finds an app by name, as pytest's configuration gives it."""

from __future__ import annotations

import importlib
from operator import attrgetter

from taskharbor.errors import InvalidRequest
from taskharbor.harbor import Harbor


def load_app(name: str) -> Harbor:
    """`package.module:attribute` -> the app."""
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise InvalidRequest(
            f"{name!r} does not name an app: write it as module:name, e.g. myapp.jobs:harbor"
        )
    app = attrgetter(attribute)(importlib.import_module(module))
    if not isinstance(app, Harbor):
        raise InvalidRequest(f"{name!r} is a {type(app).__name__}, not a Harbor")
    return app
