"""Every Python block of the README and the docs runs, in order, one namespace a page.

Console blocks run too, where they call `taskharbor`. A page whose blocks need nothing but the package is a page a
newcomer can follow.
"""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from taskharbor.cli.root import root

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w+)([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+?)(?:#([^)]*))?\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match[1], match[3]) for match in FENCE.finditer(page.read_text()) if "no-run" not in match[2]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__docs__"}
    for language, source in blocks(page):
        if language == "python":
            exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_console_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TASKHARBOR_URL", raising=False)
    console = [source for language, source in blocks(page) if language == "console"]
    for line in "".join(console).splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if line.startswith("$ ") and words[0] == "taskharbor":
            ran = CliRunner().invoke(root, words[1:])
            assert ran.exit_code == 0, f"{line}\n{ran.output}"


def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = [(page.parent / to, anchor) for to, anchor in LINK.findall(page.read_text()) if "://" not in to]
    assert [to for to, _ in links if not to.exists()] == []
    assert [(to, anchor) for to, anchor in links if anchor and anchor not in anchors(to)] == []


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:drivers|worker|testkit)/[\w/.]+\.(?:py|sql|lua))`", text)
    folders = (ROOT, ROOT / "src/taskharbor")
    assert named
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
