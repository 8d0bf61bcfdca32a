"""The output of `python -m taskharbor_testkit.conformance`: a table for people, JSON for machines."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from taskharbor_testkit.conformance.runner import Report


def print_table(report: Report, console: Console) -> None:
    """One line per file of cases, then every failure in full."""
    table = Table("part", "passed", "failed", "skipped", "seconds")
    parts: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for verdict in report.verdicts:
        part = verdict.name.partition(".")[0]
        counts = parts.setdefault(part, [0, 0, 0])
        counts[("passed", "failed", "skipped").index(verdict.outcome)] += 1
        seconds[part] = seconds.get(part, 0.0) + verdict.seconds
    for part, (passed, failed, skipped) in parts.items():
        style = "red" if failed else ""
        table.add_row(part, str(passed), str(failed), str(skipped), f"{seconds[part]:.2f}", style=style)
    console.print(table)
    for verdict in report.failures:
        console.rule(f"[red]{escape(verdict.name)}")
        console.print(escape(verdict.message), highlight=False)
    told = {verdict.message for verdict in report.verdicts if verdict.outcome == "skipped"}
    for reason in sorted(told):
        console.print(f"skipped: {escape(reason)}")
    colour = "green" if report.ok else "red"
    console.print(
        f"[{colour}]{report.count('passed')} passed, {len(report.failures)} failed, "
        f"{report.count('skipped')} skipped[/] ({escape(str(report.effort))})"
    )


def as_json(report: Report) -> str:
    body = {"ok": report.ok, "effort": report.effort, "verdicts": report.verdicts}
    return msgspec.json.format(msgspec.json.encode(body)).decode()
