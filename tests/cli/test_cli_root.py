"""What every command has in common: options on both sides, environment, errors, exit codes, help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.cli_harness import Run
from taskharbor.cli.root import SECTIONS, root

LAKE_COMMANDS = ("audit", "report", "compact", "vacuum")


def test_every_command_has_a_place_in_the_help_and_a_help_of_its_own(run: Run) -> None:
    shown = run("--help").stdout
    named = [command for _, commands in SECTIONS for command in commands]
    assert sorted(root.commands) == sorted(command.name or "" for command in named)
    for command in named:
        assert f"  {command.name} " in shown
        has_store = command.name not in ("demo", "lake", "completion")
        help_text = run(command.name or "", "--help").stdout
        assert [option in help_text for option in ("--app", "--url")] == [has_store] * 2
        assert [line for line in help_text.splitlines() if len(line) > 80] == []


def test_help_does_not_import_rich() -> None:
    """Without arguments it shows the help."""
    code = "import sys\nfrom taskharbor.cli import main\n"
    code += "try:\n    main()\nfinally:\n    print('RICH' if 'rich' in sys.modules else 'PLAIN')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Start here" in done.stdout
    assert done.stdout.endswith("PLAIN\n")


def test_options_stand_on_either_side_and_the_nearest_wins(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (["--json", "--url", "memory://a", "stats"], ["stats", "--json", "--url", "memory://a"]):
        assert json.loads(run(*args).stdout)["queues"] == []
    monkeypatch.setenv("TASKHARBOR_URL", "nonsense://")
    monkeypatch.setenv("TASKHARBOR_STATS_URL", "nonsense://")
    run("--url", "memory://", "stats")
    run("--url", "nonsense://", "stats", "--url", "memory://")


def test_options_come_from_the_environment(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKHARBOR_JSON", "1")
    monkeypatch.setenv("TASKHARBOR_ENQUEUE_QUEUE", "mail")
    run("enqueue", "greet")
    assert json.loads(run("list").stdout)["queue"] == "mail"


def test_a_typo_in_a_command_or_option_is_met_with_a_suggestion(run: Run, url: str) -> None:
    assert "did you mean 'inspect'" in run("inspct", code=2).stderr
    assert "--state" in run("list", "--stat", "ready", code=2).stderr
    assert "did you mean 'requeue'" in run("dlq", "reque", code=2).stderr
    assert "did you mean 'dlq requeue'" in run("retry", code=2).stderr


def test_errors_are_one_line_and_a_hint_with_a_traceback_on_request(run: Run, url: str) -> None:
    first, second = run("dlq", "requeue", code=2).stderr.splitlines()
    assert first == "error: say which: either ids, or a selection by --all, --queue or --type"
    assert second.startswith("hint: ")
    assert "Traceback" in run("dlq", "requeue", "--debug", code=2).stderr


@pytest.mark.parametrize(
    ("args", "code", "kind", "said"),
    [
        (["inspect", "nobody"], 1, "job_not_found", "no job with this id"),
        (["pipeline", "run", "--url", "sqlite:///missing.db"], 1, "no_store", "missing.db"),
        (["enqueue", "greet", "not json"], 2, "bad_input", "not JSON"),
        *(
            (["dlq", "requeue", *args], 2, "bad_input", "either ids, or a selection")
            for args in ([], ["id", "--all"])
        ),
        (["queues", "set", "a"], 2, "bad_input", "nothing to change"),
        *((["pipeline", name, "--lake", "x"], 2, "no_lake", "no lake in /") for name in LAKE_COMMANDS),
        (
            ["queues", "set", "a", "--create", "--failure-queue", "a"],
            2,
            "invalid_request",
            "own failure queue",
        ),
        (["stats", "--url", "what"], 2, "invalid_request", "what"),
        (["stats", "--url", "what://"], 2, "unknown_driver", "what://"),
        (["stats", "--nonsense"], 2, "usage_error", "--nonsense"),
        (["queues", "set", "a", "--max-inflight", "0"], 2, "usage_error", "pause it"),
        (["queues", "pause"], 2, "usage_error", "QUEUE"),
        *(
            (["lake", *words, "--lake", "x"], 2, "no_lake", "no lake in /")
            for words in (["tables"], ["sql", "SELECT 1"])
        ),
        (["lake", "sql", "SELECT 1", "-f", "parquet"], 2, "usage_error", "--output FILE"),
        (["lake", "sql", "SELECT 1", "-o", "no/x.csv"], 2, "usage_error", "no folder no"),
        (["pipeline", "run"], 2, "invalid_request", "memory of one process"),
        *(
            (["pipeline", *words, "--url", "what://"], 2, "unknown_driver", "what://")
            for words in (["run"], ["run", "--every", "1s"])
        ),
        *(
            ([*words, "--lake", "what://"], 2, "invalid_request", "not an object-store URL")
            for words in (["history"], ["pipeline", "report"], ["lake", "tables"])
        ),
        (["demo", "--url", "memory://"], 2, "bad_input", "leave out --url"),
        (["enqueue", "greet", "--url", "sqlite:////nowhere/at/all.db"], 3, "backend_unavailable", "/nowhere"),
    ],
)
@pytest.mark.usefixtures("url")
def test_errors_in_json(run: Run, tmp_path: Path, args: list[str], code: int, kind: str, said: str) -> None:
    """With their exit codes."""
    result = run(*args, "--json", code=code)
    *notes, error = map(json.loads, result.stderr.splitlines())
    assert [
        note for note in notes if "TASKHARBOR_URL=memory://cli-test is not used" not in note["note"]
    ] == []
    assert (error["error"]["code"], result.stdout) == (kind, "")
    assert said in error["error"]["detail"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["list", "stats", "inspect x", "cancel x", "dlq list", "queues"])
def test_looking_does_not_create_a_database(run: Run, tmp_path: Path, command: str) -> None:
    words, missing = command.split(), (f"there is no taskharbor.db in {tmp_path}", "TASKHARBOR_URL")
    assert [part for part in missing if part not in run(*words, code=1).stderr] == []
    assert "there is no database other.db" in run(*words, "--url", "sqlite:///other.db", code=1).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_default_store_is_a_file_in_the_current_folder(run: Run, tmp_path: Path) -> None:
    job_id = run("enqueue", "greet", '{"name": "Ada"}').stdout.strip()
    assert (tmp_path / "taskharbor.db").exists()
    assert job_id in run("list").stdout


def test_completion(run: Run) -> None:
    assert "_TASKHARBOR_COMPLETE" in run("completion", "zsh").stdout
    environment = {"_TASKHARBOR_COMPLETE": "zsh_complete", "COMP_WORDS": "taskharbor ins", "COMP_CWORD": "1"}
    assert "inspect" in run(env=environment).stdout
