"""`python -m benchmarks size`: code lines and files by folder, without comments, docstrings and blank lines.

Python is counted by tokens. Every other text file of the wheel is counted by its lines that are neither blank nor a comment.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import msgspec
from rich.table import Table

ROOT = Path(__file__).parents[1]
TREES = {"product": ROOT / "src/taskharbor", "testkit": ROOT / "testkit/src/taskharbor_testkit"}

_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_COMMENTS = {".sql": "--", ".lua": "--", ".toml": "#", ".yaml": "#", ".yml": "#"}
"""How a line of comment begins, by the ending of a file's name."""


class Folder(msgspec.Struct):
    """Everything directly in one folder."""

    name: str
    lines: int = 0
    modules: int = 0
    other_files: int = 0
    longest: tuple[int, str] = (0, "")


def measure(root: Path) -> list[Folder]:
    """The folders of a tree, by name. Folders without a text file are left out."""
    folders: dict[str, Folder] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = str(path.parent.relative_to(root))
        folder = folders.setdefault(name, Folder(name))
        if path.suffix == ".py":
            lines = python_lines(text)
            folder.modules += 1
            folder.longest = max(folder.longest, (lines, path.name))
        else:
            lines = other_lines(text, _COMMENTS.get(path.suffix))
            folder.other_files += 1
        folder.lines += lines
    return list(folders.values())


def python_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def other_lines(text: str, comment: str | None) -> int:
    stripped = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not (comment and line.startswith(comment)) for line in stripped)


def table(name: str, folders: list[Folder]) -> Table:
    shown = Table("folder", "code lines", "modules", "other files", "longest module", title=name)
    for column in shown.columns[1:4]:
        column.justify = "right"
    for folder in folders:
        lines, longest = folder.longest
        shown.add_row(
            folder.name,
            f"{folder.lines:,}",
            str(folder.modules),
            str(folder.other_files),
            f"{lines:,} {longest}" if longest else "",
        )
    shown.add_section()
    shown.add_row(
        "total",
        f"{sum(folder.lines for folder in folders):,}",
        str(sum(folder.modules for folder in folders)),
        str(sum(folder.other_files for folder in folders)),
        "{:,} {}".format(*max((folder.longest for folder in folders), default=(0, ""))),
    )
    return shown
