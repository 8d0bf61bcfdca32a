"""`notebook_program.py FILE`: run the code cells of a notebook one after the other, in this process, as a notebook does.

A cell may have `await` at its top level.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any


async def run(file: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(file.read_text("utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            text, place = "".join(cell["source"]), f"{file.name}, cell {number}"
            code = compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(code, names)  # noqa: S307
            if inspect.isawaitable(waiting):
                await waiting


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
