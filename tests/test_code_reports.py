"""The two reports on the code itself: its size, and the files that one job's path enters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import size

ROOT = Path(__file__).parents[1]

WALK = """
import json
from benchmarks.walk import walk
if __name__ == "__main__":
    print(json.dumps({one.driver: [one.enqueue, one.work] for one in walk(["memory", "sqlite"])}))
"""


def test_every_text_file_counts_without_comments_docstrings_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    code = '"""Docs."""\n\n# why\nx = """a\nb"""\n\n\ndef f() -> int:\n    """Docs."""\n    return 1\n'
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "sql/b.sql").write_text("-- why\n\nselect 1\n")
    (tmp_path / "sql/c.html").write_text("<p>\n")
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe")
    found = {folder.name: folder for folder in size.measure(tmp_path)}
    assert (found["."].lines, found["."].modules, found["."].longest) == (4, 1, (4, "a.py"))
    assert (found["sql"].lines, found["sql"].modules, found["sql"].other_files) == (2, 0, 2)


def test_a_walk_sees_all_threads(tmp_path: Path) -> None:
    program = tmp_path / "walking.py"
    program.write_text(WALK)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    for enqueue, work in json.loads(ran.stdout).values():
        # A synchronous call passes to a thread with an event loop; a handler runs beside the thread that settles.
        assert {"harbor.py", "client.py", "requests.py"} <= set(enqueue)
        assert {"worker/fetch.py", "worker/run.py", "worker/settle.py"} <= set(work)
