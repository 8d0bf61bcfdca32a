"""Log output of a worker process: lines for people, or JSON for machines.

Only the logger "taskharbor" is set up; an app's own loggers are the app's. Of a record's extra fields only known ones
are written, so that no payload reaches a log by way of `extra=`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["text", "json"]

FIELDS = ("worker", "queue", "job_id", "job_type", "outcome", "attempt", "fence", "seconds")
"""Extra fields that may be logged: names, numbers and ids, never what a job carries."""

_COLOURS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31;1m",
}


class TextFormatter(logging.Formatter):
    """`12:30:01.250 warning worker: the message`."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        role = record.name.rpartition(".")[2]
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<7} {role}: {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        colour = _COLOURS.get(record.levelno, "") if self._colour else ""
        return f"{colour}{line}\x1b[0m" if colour else line


class JSONFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, the known fields, and the error where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        for name in FIELDS:
            value = record.__dict__.get(name)
            if isinstance(value, (str, int, float)):
                document[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            document["error_type"] = record.exc_info[0].__name__
            document["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document).decode()


def set_up_logs(
    level: str = "info", style: LogFormat = "text", stream: TextIO | None = None
) -> logging.Handler:
    """Send the logger "taskharbor" to `stream` (stderr), replacing what an earlier call set up."""
    target = sys.stderr if stream is None else stream
    handler: logging.Handler = logging.StreamHandler(target)
    colour = target.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(JSONFormatter() if style == "json" else TextFormatter(colour=colour))
    handler.set_name("taskharbor-cli")
    logger = logging.getLogger("taskharbor")
    for old in [one for one in logger.handlers if one.get_name() == "taskharbor-cli"]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # An app that set up the root logger would show every line twice.
    return handler
