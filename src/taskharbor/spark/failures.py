"""Failures of Spark, of files and of the lake's library in one sentence, without Java's stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from taskharbor.errors import BackendUnavailable, TaskHarborError
from taskharbor.lake.delta import LibraryError
from taskharbor.lake.storage import plain_failure

# The last line of a traceback of Python, which a task sends, and the causes that an object store's library lists below it.
_PYTHON = re.compile(r"^(?:\w+\.)*([A-Z]\w+): (.+(?:\n(?:.*\u21b3|<).*)*)$", re.MULTILINE)
_CAUSES = {
    "a file is damaged": r"CANNOT_READ_FILE|FAILED_READ_FILE|not a Parquet file|Parquet magic bytes",
    "the disk is full": r"No space left on device|File too large",
    "the place cannot be written": r"Not a directory|Read-only file system|Permission denied|File exists",
}
_PATH = re.compile(r"(?<![\w/])(?:file:(?://)?)?((?:/[^\s/:,;'\"]+){2,})")


class PipelineFailed(TaskHarborError):
    """Spark, the disk or the lake's library failed. What was not committed does not count."""


@contextmanager
def plain_failures() -> Iterator[None]:
    """Raise failures of the block as errors of ours."""
    try:
        yield
    except (PySparkException, Py4JError, LibraryError, OSError) as error:
        if isinstance(error, TaskHarborError):
            raise
        text = str(error)
        is_of_spark = isinstance(error, (PySparkException, Py4JError))
        in_task = _PYTHON.findall(text) if is_of_spark else []
        name, reason = (
            in_task[-1] if in_task else ("", text.strip().partition("\n")[0] if is_of_spark else text)
        )
        if name == BackendUnavailable.__name__:
            raise BackendUnavailable(reason) from error
        cause = next((cause for cause, pattern in _CAUSES.items() if re.search(pattern, text)), None)
        if cause is None:
            raise PipelineFailed(plain_failure(reason)) from error
        path = _PATH.search(text if cause.startswith("a file") else reason)
        where = f" ({path[1]})" if path else ""
        raise PipelineFailed(f"{cause}{where}; no part of this run counts that was not committed") from error
