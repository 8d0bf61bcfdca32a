"""Every Python block of the docs runs, in order, one namespace a page. The README is typed as it stands.

Console blocks run too, where they call `taskharbor`. A page whose blocks need nothing but the package is a page a
newcomer can follow.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from taskharbor.cli.root import root

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
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


def test_the_readme_as_it_is_typed(tmp_path: Path) -> None:
    """In an empty folder: files are saved under the name in their first line, and all commands run in one shell."""
    here, tools = tmp_path / "here", tmp_path / "tools"
    here.mkdir()
    tools.mkdir()
    for name, command in (("python", ""), ("taskharbor", "-m taskharbor")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        (tools / name).chmod(0o755)
    script = ["set -e"]
    for language, source in blocks(README):
        if language == "python":
            name = source.partition("\n")[0].removeprefix("# ")
            script.append(f"cat > {shlex.quote(name)} <<'END'\n{source}END")
        lines = [line.removeprefix("$ ") for line in source.splitlines() if line.startswith("$ ")]
        script += [line for line in lines if line.split()[0] not in ("make", "pip")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASKHARBOR_")}
    environment = {**kept, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    typed = subprocess.run(
        ["sh", "-c", "\n".join(script)],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert typed.returncode == 0, typed.stdout + typed.stderr
    assert "done HELLO Ada!" in typed.stdout
    assert "stopped after 1 execution" in typed.stderr  # The worker ran the job that `enqueue` added.
    assert "warning" not in typed.stderr
    assert sorted(path.name for path in here.glob("*.db")) == ["taskharbor.db"]


def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
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
