"""Log output of a worker process: lines for people, or JSON for machines.

The root logger is set up, so that lines of handlers and libraries come out in the same form. A line that a handler logs has
the id, type, queue and attempt of its job. Of a record's extra fields only known ones are written, so that no payload reaches
a log by way of `extra=`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, TypeAlias

from taskharbor.middleware import Call, Job, Raised, current_job
from taskharbor.printable import printable, printable_json
from taskharbor.worker.decide import describe

LogFormat: TypeAlias = Literal["text", "json"]

log = logging.getLogger("taskharbor.worker")

FIELDS = (
    *("worker", "queue", "job_id", "job_type", "outcome", "attempt", "fence", "seconds"),
    *("error_type", "error_message"),
)
"""Extra fields that may be logged: names, numbers, ids and errors, never what a job carries."""

_COLOURS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31;1m",
}


class JobFields(logging.Filter):
    """Gives a record the job in whose handler it was made: `job_id`, `job_type`, `queue` and `attempt`."""

    def filter(self, record: logging.LogRecord) -> bool:
        with suppress(RuntimeError):  # No job runs here.
            if "job_id" not in record.__dict__:
                job = current_job()
                record.__dict__.update(job_id=job.id, job_type=job.type, queue=job.queue, attempt=job.attempt)
        return True


class _Formatter(logging.Formatter):
    def __init__(self, *, colour: bool = False, tracebacks: bool = True) -> None:
        super().__init__()
        self._colour = colour
        self._tracebacks = tracebacks

    def _message(self, record: logging.LogRecord) -> str:
        """The message. Names in a message of this package come from jobs and requests, so no part of it begins a line."""
        text = record.getMessage()
        return printable(text) if record.name.startswith("taskharbor.") else text

    def _traceback(self, record: logging.LogRecord) -> str:
        if not self._tracebacks:
            return ""
        # A record from a process of its own has the text only.
        return record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")


class TextFormatter(_Formatter):
    """`12:30:01.250 warning worker: the message`. A line of a handler ends with its job."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("taskharbor.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<7} {name}: {self._message(record).rstrip()}"
        is_own = name != record.name
        if not is_own and (job_id := record.__dict__.get("job_id")):
            job = f"  [{record.__dict__.get('job_type')} {job_id} attempt {record.__dict__.get('attempt')}]"
            line += printable(job)
        if trace := self._traceback(record).rstrip():
            # The text of an error may have lines that look like others of the log.
            line += ("\n" + printable(trace, "\n\t")).replace("\n", "\n  ")
        colour = _COLOURS.get(record.levelno, "") if self._colour else ""
        return f"{colour}{line}\x1b[0m" if colour else line


class JSONFormatter(_Formatter):
    """One object per line: time, level, logger, message, the known fields, and the error where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            "pid": record.process,
        }
        for name in FIELDS:
            value = record.__dict__.get(name)
            if isinstance(value, (str, int, float)):
                document[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            document["error_type"] = record.exc_info[0].__name__
            document["error_message"] = str(record.exc_info[1])
        if trace := self._traceback(record):
            document["traceback"] = trace
        return printable_json(document)


def log_trace(
    log: logging.Logger,
    level: int,
    text: str,
    *values: object,
    trace: str,
    extra: dict[str, object] | None = None,
) -> None:
    """Log a message with a traceback that is text: its exception is in another process, or its message may not be shown."""
    if log.isEnabledFor(level):
        record = log.makeRecord(log.name, level, __file__, 0, text, values, None, extra=extra)
        record.exc_text = trace
        log.handle(record)


def set_up_logs(
    level: str = "info", style: LogFormat = "text", stream: TextIO | None = None, *, tracebacks: bool = True
) -> logging.Handler:
    """Send all loggers and warnings to `stream` (stderr), replacing what an earlier call set up."""
    target = sys.stderr if stream is None else stream
    handler: logging.Handler = logging.StreamHandler(target)
    colour = target.isatty() and not os.environ.get("NO_COLOR")
    form = JSONFormatter if style == "json" else TextFormatter
    handler.setFormatter(form(colour=colour, tracebacks=tracebacks))
    handler.addFilter(JobFields())
    handler.set_name("taskharbor-cli")
    root = logging.getLogger()
    for old in [one for one in root.handlers if one.get_name() == "taskharbor-cli"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    capture_warnings()
    return handler


def capture_warnings() -> None:
    """Send warnings, and errors that end a thread, to the log."""
    logging.captureWarnings(True)
    threading.excepthook = _log_thread


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = "" if ended.thread is None else ended.thread.name
        log.error("the thread %s failed", name, exc_info=ended.exc_value)


def logged(call: Call) -> Call:
    """Log start and end of every execution. Only for a worker that logs at debug: others do not pay for it."""

    async def timed(job: Job) -> Any:
        log.debug("%s %s starts, attempt %d of %d", job.type, job.id, job.attempt, job.max_attempts)
        began, how = time.perf_counter(), "was stopped"
        try:
            outcome = await call(job)
            how = f"raised {describe(outcome.error).type}" if isinstance(outcome, Raised) else "returned"
            return outcome
        finally:
            seconds = time.perf_counter() - began
            log.debug("%s %s %s after %.3f s", job.type, job.id, how, seconds, extra={"seconds": seconds})

    return timed
