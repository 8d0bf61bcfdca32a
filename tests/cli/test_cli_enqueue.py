"""One job from the command line, many from JSON lines."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.cli_harness import Run, lines
from taskharbor.bulk import stage
from taskharbor.cli.enqueue import Lines
from taskharbor.client import Client, portal
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import JobRecord, JobRequest, JobState, UpdateFlags


def test_one_job_with_everything(run: Run, client: Client) -> None:
    result = run(
        *("enqueue", "greet", '{"name": "Ada"}', "--queue", "mail", "--priority", "7", "--delay", "1h"),
        *("--key", "ada", "--update-run-at", "later", "--update-retry", "--idempotency-key", "once"),
        *("--max-attempts", "2", "--timeout", "30s", "--header", "trace=abc", "--header", "a=b=c"),
    )
    job = client.get(result.stdout.strip())
    assert (job.type, job.queue, job.priority, job.key) == ("greet", "mail", 7, "ada")
    assert (json.loads(job.payload), job.state) == ({"name": "Ada"}, JobState.SCHEDULED)
    assert job.run_at_us - job.created_at_us == 3600 * 1_000_000
    assert job.update == UpdateFlags(run_at="later", retry=True)
    assert (job.idempotency_key, job.max_attempts, job.timeout_us) == ("once", 2, 30_000_000)
    assert job.headers == {"trace": "abc", "a": "b=c"}


def test_payloads_and_times(run: Run, client: Client) -> None:
    def enqueued(*args: str) -> JobRecord:
        return client.get(run("enqueue", "greet", *args, input='{"name": "from stdin"}').stdout.strip())

    # Arguments are JSON where they can be, and text otherwise.
    job = enqueued("--arg", "n=3", "--arg", "ok=true", "--arg", "name=Ada", "--arg", 'zip="0123"')
    assert json.loads(job.payload) == {"n": 3, "ok": True, "name": "Ada", "zip": "0123"}
    assert json.loads(enqueued("-").payload) == {"name": "from stdin"}
    assert enqueued("--run-at", "2099-01-01T12:00+01:00").run_at == datetime(2099, 1, 1, 11, tzinfo=UTC)


def test_a_second_one_of_a_key_says_that_it_was_there(run: Run, url: str) -> None:
    first = json.loads(run("enqueue", "greet", "--key", "k", "--json").stdout)
    second = json.loads(run("enqueue", "greet", "--key", "k", "--json").stdout)
    assert second == {"id": first["id"], "existed": True}
    assert "there already" in run("enqueue", "greet", "--key", "k").stderr


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "say which type"),
        (["greet", "{"], "not JSON"),
        (["greet", "{name:", "Ada}"], "here are 2: {name: Ada}"),
        (["greet", "{}", "--arg", "a=1"], "not both"),
        (["greet", "--arg", "a"], "name=value"),
        (["greet", "--delay", "soon"], "not a duration"),
        (["greet", "--run-at", "soon"], "not a time"),
        (["greet", "--run-at", "2099-01-01", "--delay", "5"], "not both"),
        (["greet", "--update-retry"], "give --key"),
        (["greet", "--priority", "99999"], "priority 99999"),
        (["greet", "--from", "-"], "leave out TYPE"),
        (["--from", "-", "--queue", "q"], "leave out --queue"),
        (["greet", "--once", "x"], "--idempotency-key"),
        (["--from", "-", "--once", "x", "--ids"], "leave out --ids"),
        *((["--from", "-", "--once", name], "a name of 1 to 200") for name in (" ", "x" * 201)),
        (["--from", "-", "--once", "x"], "no job in it"),
        (["--url", "memory://", "--from", "-"], "a new store inside this process"),
    ],
)
def test_bad_input_is_refused(run: Run, client: Client, args: list[str], complaint: str) -> None:
    assert complaint in run("enqueue", *args, input="", code=2).stderr
    assert client.list_jobs().jobs == []


def test_many_from_a_file(run: Run, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text(
        '\ufeff{"type": "a", "payload": [1], "queue": "q", "priority": 3, "headers": {"x": "y"}}\n'
        '{"type": "b", "delay_seconds": 60, "key": "k", "update": {"run_at": "later"}, "backoff_seconds": [1, 2]}\n'
        '{"type": "c", "run_at": "2099-01-01T00:00:00Z", "timeout_seconds": 2.5, "max_attempts": 9, "max_stalls": 1}\n\n'
    )
    a, b, c = map(client.get, run("enqueue", "--from", str(file)).stdout.split())
    assert (a.type, a.queue, a.priority, a.headers, json.loads(a.payload)) == ("a", "q", 3, {"x": "y"}, [1])
    later = UpdateFlags(run_at="later")
    assert (b.state, b.update, b.backoff_max_us) == (JobState.SCHEDULED, later, 2_000_000)
    assert (c.run_at.year, c.timeout_us, c.max_attempts, c.max_stalls) == (2099, 2_500_000, 9, 1)


def test_a_listed_job_is_a_line_that_can_be_enqueued(run: Run, client: Client) -> None:
    options = ["--priority", "3", "--timeout", "5s", "--header", "a=b"]
    before = client.get(run("enqueue", "greet", '{"name": "Ada"}', *options).stdout.strip())
    client.enqueue(JobRequest(type="packed", payload={"n": 1}, codec="msgpack"))
    listed = run("list", "--json", "--payload").stdout
    packed, greet = map(client.get, run("enqueue", "--from", "-", input=listed).stdout.split())
    assert greet.id != before.id
    assert msgspec.structs.replace(greet, id=before.id, created_at_us=before.created_at_us) == before
    assert (packed.codec, msgspec.msgpack.decode(packed.payload)) == ("msgpack", {"n": 1})


def test_many_from_stdin_with_a_summary(run: Run, client: Client) -> None:
    text = "".join(json.dumps({"type": "a", "idempotency_key": str(n % 40)}) + "\n" for n in range(100))
    summary = json.loads(run("enqueue", "--from", "-", "--chunk", "7", "--json", input=text).stdout)
    assert (summary["accepted"], summary["new"], summary["existed"]) == (100, 40, 60)
    assert [stats.counts[JobState.READY] for stats in client.stats()] == [40]
    printed = lines(run("enqueue", "--from", "-", "--json", "--ids", input='{"type": "a"}\n'))
    assert [set(line) for line in printed] == [{"id", "existed"}, {"accepted", "new", "existed", "seconds"}]


def test_with_an_app_the_declaration_counts(run: Run, client: Client, tmp_path: Path) -> None:
    """A wrong payload is refused before it is stored."""
    (tmp_path / "declaring.py").write_text(
        "from taskharbor import Harbor\n"
        "harbor = Harbor()\n"
        "@harbor.job(queue='mail', max_attempts=3, timeout=9)\n"
        "def greet(name: str) -> None: ...\n"
    )
    app = ["enqueue", "--app", "declaring:harbor"]
    line = {"type": "greet", "payload": {"name": "Ada"}}
    packed = {"type": "greet", "payload_base64": "gaRuYW1lo0FkYQ==", "codec": "msgpack"}
    from_file = run(*app, "--from", "-", input=f"{json.dumps(line)}\n{json.dumps(packed)}").stdout
    ids = [run(*app, "greet", "--arg", "name=Ada").stdout, *from_file.split()]
    jobs = [client.get(one.strip()) for one in ids]
    assert {(job.queue, job.max_attempts, job.timeout_us) for job in jobs} == {("mail", 3, 9_000_000)}
    assert client.get(run(*app, "greet", '{"name": "Ada"}', "-q", "other").stdout.strip()).queue == "other"
    number = client.get(run(*app, "greet", "--arg", "name=5").stdout.strip())
    assert json.loads(number.payload) == {"name": "5"}  # A text by its declaration.
    before = len(client.list_jobs().jobs)
    for payload, complaint in (
        ('{"nope": 1}', "'name'; it has no nope"),
        ('{"name": 1}', "Expected `str`"),
        ("[1]", "mapping"),
    ):
        assert complaint in run(*app, "greet", payload, code=2).stderr
        wrong = f'{{"type": "greet", "payload": {payload}}}'
        assert complaint in run(*app, "--from", "-", input=wrong, code=2).stderr
        assert complaint in run(*app, "--from", "-", "--once", "x", input=wrong, code=2).stderr
    assert "did you mean 'greet'?" in run(*app, "gret", code=2).stderr
    assert len(client.list_jobs().jobs) == before


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (
            '{"type": "a", "id": "x", "state": "ready"}',
            "without its payload: list it with payloads (`list --json --payload`",
        ),
        ('{"type": "a"', "truncated"),
        ('{"type": "a", "quue": "x"}', "quue"),
        ('{"type": "a", "priority": 99999}', "priority 99999"),
        ('{"type": "a", "codec": "pickle"}', "pickle"),
        ('{"type": "a", "priority": 99999, "queue', "`$.priority`"),
        ('{"type": "a", "payload": 1, "payload_base64": "MQ=="}', "not both"),
    ],
)
def test_a_bad_line_is_named(run: Run, client: Client, bad: str, complaint: str) -> None:
    """And what stood before it is accepted."""
    text = '{"type": "a"}\n\n' * 5 + bad + "\n" + '{"type": "a"}\n' * 5
    error = json.loads(run("enqueue", "--from", "-", "--chunk", "3", "--json", input=text, code=2).stderr)
    assert (error["line"], error["accepted"]) == (11, 5)
    assert [part for part in ("line 11", complaint) if part not in error["error"]["detail"]] == []
    assert "tail -n +11" in error["error"]["hint"]
    assert len(client.list_jobs(JobFilter(types=frozenset({"a"}))).jobs) == 5


def test_the_way_to_go_on_after_a_bad_line_repeats_the_call(run: Run, tmp_path: Path) -> None:
    """With its app and its store, so that the rest is checked too, and goes to the same place."""
    (tmp_path / "going_on.py").write_text(
        "from taskharbor import Harbor\nharbor = Harbor()\n@harbor.job\ndef greet(name: str) -> None: ...\n"
    )
    file = tmp_path / "my jobs.jsonl"
    good = '{"type": "greet", "payload": {"name": "Ada"}}\n'
    file.write_text(good + '{"type": "greet", "payload": {}}\n' + good)
    args = ["--app", "going_on:harbor", "enqueue", "--from", str(file), "--url", "sqlite:///given.db"]
    said = run(*args, code=2).stderr
    assert "1 job before it accepted" in said
    again = "taskharbor --app going_on:harbor enqueue --from - --url sqlite:///given.db"
    assert f"tail -n +2 '{file}' | {again}\n" in said
    args[3:5], args[5:] = [f"--from={file}"], ["--url", "redis://ada:secret@nowhere:1/"]
    assert "secret" not in run(*args, "--url", "sqlite:///given.db", code=2).stderr


def test_a_chunk_is_read_when_the_one_before_it_was_sent() -> None:
    line = b'{"type": "a"}\n'
    source = Lines(io.BytesIO(line * 1000))
    for number, records in enumerate(source.chunks(10, lambda: 0), 1):
        assert (len(records), source.bytes_read) == (10, number * 10 * len(line))
    assert source.next_line == 1001


def test_once_enqueues_all_lines_and_never_again(run: Run, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text("".join(f'{{"type": "t", "payload": {{"n": {n}}}}}\n' for n in range(25)))
    first = json.loads(run("enqueue", "--from", str(file), "--once", "load/7", "--json").stdout)
    again = json.loads(run("enqueue", "--from", str(file), "--once", "load/7", "--json").stdout)
    assert (first["accepted"], first["new"], first["existed"]) == (25, 25, 0)
    assert again == {"accepted": 0, "new": 0, "existed": 0, "before": 25}
    assert len(client.list_jobs(JobFilter()).jobs) == 25
    said = run("enqueue", "--from", "-", "--once", "load/7", input='{"type": "other"}').stderr
    assert "'load/7' was used before, for 25 jobs: this file was not read" in said
    # A lower number is another name, not an older batch of a stream.
    run("enqueue", "--from", str(file), "--once", "load/6")
    assert len(client.list_jobs(JobFilter()).jobs) == 50


@pytest.mark.parametrize("bad", ["{", '{"type": ""}', '{"type": "t", "codec": "none-such"}'])
def test_a_bad_line_with_once_changes_nothing(run: Run, client: Client, bad: str) -> None:
    good = '{"type": "t"}\n'
    text = good * 3 + bad + "\n" + good
    error = json.loads(run("enqueue", "--from", "-", "--once", "x", "--json", input=text, code=2).stderr)
    assert [part for part in ("line 4", "nothing was enqueued") if part not in error["error"]["detail"]] == []
    assert client.list_jobs(JobFilter()).jobs == []
    assert portal().call(client.driver.list_blobs("staging")) == []
    summary = json.loads(run("enqueue", "--from", "-", "--once", "x", "--json", input=good * 4).stdout)
    assert summary["new"] == 4


@pytest.mark.parametrize("once", [[], ["--once", "x"]])
def test_a_lost_store_is_told(run: Run, monkeypatch: pytest.MonkeyPatch, once: list[str]) -> None:
    """With what was accepted."""
    real, calls = SQLiteDriver.run, []

    def lost(driver: SQLiteDriver, call: op.Operation[Any]) -> Any:
        if isinstance(call, (op.Enqueue, op.PutBlob)):
            calls.append(call)
            if len(calls) > 2:
                raise BackendUnavailable("the store is gone")
        return real(driver, call)

    monkeypatch.setattr(SQLiteDriver, "run", lost)
    monkeypatch.setattr(stage, "BLOB_JOBS", 3)
    args = ["enqueue", "--from", "-", "--chunk", "3", *once, "--json"]
    error = json.loads(run(*args, input='{"type": "a"}\n' * 20, code=3).stderr)
    assert "the store is gone" in error["error"]["detail"]
    if once:
        assert "same command again" in error["error"]["hint"]
    else:
        assert (error["accepted"], error["line"]) == (6, 7)
