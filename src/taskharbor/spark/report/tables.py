"""The parts of the page that are words and tables. Whatever was stored by somebody is escaped; payloads are not here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taskharbor.spark.report.data import ErrorGroup, JobLine, ReportData, Verdict
from taskharbor.spark.report.wording import (
    count,
    duration,
    escaped,
    instant,
    percent,
    plural,
    shortened,
    time_of,
)

MESSAGE_LENGTH = 240
_TICK = "M5 13.5l4.5 4.5L19 7.5"
_CROSS = "M12 6v8M12 18.2v.1"
_DASH = "M6 12h12"


def verdict(found: Verdict | None) -> str:
    if found is None:
        return _banner(
            "unknown",
            _DASH,
            "Not audited.",
            "<p>Run the audit to check the guarantees over this history.</p>",
        )
    checked = f"{plural(found.leases, 'lease')} of {plural(found.jobs, 'job')}"
    if found.is_clean:
        promises = (
            "No lease overlapped another, fences only grew, no limit was exceeded, nothing ran early, "
            "and every job that ended, ended once."
        )
        return _banner("clean", _TICK, f"No violation in {checked}.", f"<p>{promises}</p>")
    total = sum(found.kinds.values())
    kinds = "".join(
        f"<li><b>{count(number)}</b> {escaped(kind)}</li>" for kind, number in _most_first(found.kinds)
    )
    examples = "".join(f"<li>{escaped(shortened(one, 400))}</li>" for one in found.examples)
    told = f"<ul>{kinds}</ul>" + (f"<p>For example:</p><ul>{examples}</ul>" if examples else "")
    return _banner("broken", _CROSS, f"{plural(total, 'violation')} in {checked}.", told)


def _banner(look: str, sign: str, headline: str, rest: str) -> str:
    picture = f'<svg viewBox="0 0 24 24" aria-hidden="true"><path class="sign" d="{sign}"/></svg>'
    return f'<section class="verdict {look}">{picture}<div><h2>{escaped(headline)}</h2>{rest}</div></section>'


def key_numbers(data: ReportData) -> str:
    totals = data.totals
    entries = [
        ("Jobs", count(totals.jobs), f"in {plural(totals.queues, 'queue')}", ""),
        ("Done", count(totals.done), percent(totals.done, totals.jobs), ""),
        (
            "Dead",
            count(totals.dead),
            percent(totals.dead, totals.jobs),
            "alarm" if totals.dead else "",
        ),
        ("Retried", count(totals.retried), f"of {plural(totals.executions, 'execution')}", ""),
        ("Leases expired", count(totals.expired), f"on {plural(totals.workers, 'worker')}", ""),
        ("Wait, median", duration(totals.wait_p50_us), f"95% within {duration(totals.wait_p95_us)}", ""),
        ("Run, median", duration(totals.run_p50_us), f"95% within {duration(totals.run_p95_us)}", ""),
        ("Cancelled", count(totals.cancelled), "or merged into another", ""),
        ("Not ended", count(totals.open), "at the end of the log", ""),
    ]
    if totals.busiest_queue is not None:
        share = percent(totals.busiest_executions, totals.executions)
        entries.append(
            ("Busiest queue", shortened(totals.busiest_queue, 40), f"{share} of the executions", "name")
        )
    tiles = "".join(
        f'<div><dt>{escaped(name)}</dt><dd class="{look}">{escaped(number)}</dd><dd>{escaped(note)}</dd></div>'
        for name, number, note, look in entries
    )
    return f'<dl class="numbers">{tiles}</dl>'


def errors(data: ReportData) -> str:
    if not data.errors:
        return ""
    most = max(one.count for one in data.errors)
    rows = [_error_row(one, most, data) for one in data.errors]
    lede = "The most frequent first. Messages that differ only in ids, numbers or addresses count as one."
    return _section(
        "Errors",
        lede,
        (
            ("Count", "number"),
            ("Error", ""),
            ("Where", "less"),
            ("First and last", "less"),
            ("A job", "less"),
        ),
        rows,
    )


def _error_row(one: ErrorGroup, most: int, data: ReportData) -> list[str]:
    span = data.end_us - data.start_us
    first = time_of(one.first_seen_us, 1_000_000, span)
    last = time_of(one.last_seen_us, 1_000_000, span)
    bar = f'<span class="bar" style="width:{max(4, round(64 * one.count / most))}px"></span>'
    message = escaped(shortened(one.sample_message or one.fingerprint, MESSAGE_LENGTH))
    seen = first if first == last else f"{first}<br>{last}"
    return [
        f"{count(one.count)}{bar}",
        f"<b>{escaped(one.error_type)}</b><small><code>{message}</code></small>",
        f"{escaped(one.type)}<small>{escaped(one.queue)}</small>",
        f'<span class="when">{seen}</span>',
        f"<code>{escaped(one.sample_job)}</code>",
    ]


def jobs(title: str, lede: str, lines: Sequence[JobLine]) -> str:
    if not lines:
        return ""
    rows = [
        [
            f"<code>{escaped(one.job_id)}</code>"
            + (
                f"<small>{escaped(shortened(one.last_error, MESSAGE_LENGTH))}</small>"
                if one.last_error
                else ""
            ),
            f"{escaped(one.type)}<small>{escaped(one.queue)}</small>",
            f'<span class="state-{escaped(one.state)}">{escaped(one.state)}</span>',
            count(one.executions),
            duration(one.waited_us),
            duration(one.ran_us),
            duration(one.total_us),
        ]
        for one in lines
    ]
    columns = (
        ("Job", ""),
        ("Type, queue", ""),
        ("State", "less"),
        ("Executions", "number less"),
        ("Waited", "number less"),
        ("Ran", "number less"),
        ("Total", "number"),
    )
    return _section(title, lede, columns, rows)


def footer(data: ReportData) -> str:
    return escaped(f"Made {instant(data.made_at_us)} UTC from the attempt log. All times are UTC.")


def _section(title: str, lede: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """The cells are HTML already; the titles are not."""
    head = "".join(f'<th class="{look}" scope="col">{escaped(name)}</th>' for name, look in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{look}">{cell}</td>' for (_, look), cell in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section><h2>{escaped(title)}</h2><p class="lede">{escaped(lede)}</p>{table}</section>'


def _most_first(numbers: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(numbers.items(), key=lambda one: (-one[1], one[0]))
