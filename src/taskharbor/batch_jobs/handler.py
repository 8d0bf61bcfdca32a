"""The code behind a batch job, and how many rows it takes at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from taskharbor.batch_jobs.batch import Batch, set_current_batch
from taskharbor.batch_jobs.outcomes import per_row
from taskharbor.batch_jobs.rows import Rows
from taskharbor.codec import CodecRegistry
from taskharbor.errors import InvalidRequest
from taskharbor.handlers import Handler, OnInvalid, make_handler
from taskharbor.middleware import Job, PayloadRejected, Raised
from taskharbor.retry import RetryPolicy

DEFAULT_SIZE = 5000
LARGEST_SIZE = 100_000

Frame: TypeAlias = Literal["arrow", "pandas"]
_FRAMES: dict[str, tuple[str, Frame]] = {"Table": ("pyarrow", "arrow"), "DataFrame": ("pandas", "pandas")}


class BatchHandler(Handler, frozen=True, kw_only=True):
    """`function` takes one `Job`, as of any handler: it runs a batch of one, for tools that go job by job."""

    batch_function: Callable[[Any], Any]
    rows: Rows
    frame: Frame
    size: int

    def view(self, table: Any) -> Any:
        return table.to_pandas() if self.frame == "pandas" else table


def make_batch_handler(
    type: str,
    function: Callable[[Any], Any],
    *,
    codecs: CodecRegistry,
    row: Callable[..., Any] | None = None,
    size: int = DEFAULT_SIZE,
    job_columns: Sequence[str] = (),
    retry: RetryPolicy | None = None,
    on_invalid: OnInvalid = "dead",
) -> BatchHandler:
    if not 1 <= size <= LARGEST_SIZE:
        raise InvalidRequest(f"{type!r}: size {size}: from 1 to {LARGEST_SIZE}")
    frame = _frame(type, function)
    rows = Rows(type, row, job_columns)
    single = make_handler(
        type, _job_by_job(function, rows, frame, codecs), retry=retry, on_invalid=on_invalid
    )
    return BatchHandler(
        type=type,
        function=single.function,
        is_async=single.is_async,
        isolation=single.isolation,
        retry=single.retry,
        on_invalid=single.on_invalid,
        batch_function=function,
        rows=rows,
        frame=frame,
        size=size,
    )


def _frame(type: str, function: Callable[[Any], Any]) -> Frame:
    """By the annotation. Read as text too, so that the library may be imported for type checkers only."""
    parameters = list(inspect.signature(function).parameters.values())
    annotation = parameters[0].annotation if len(parameters) == 1 else None
    if isinstance(annotation, str):
        found = _FRAMES.get(annotation.rpartition(".")[2])
    else:
        found = _FRAMES.get(getattr(annotation, "__name__", ""))
        if found is not None and not annotation.__module__.startswith(found[0]):
            found = None
    if found is None:
        raise InvalidRequest(
            f"{type!r}: a batch handler takes one parameter, annotated pyarrow.Table or pandas.DataFrame: "
            "that is what it is given"
        )
    return found[1]


def _job_by_job(
    function: Callable[[Any], Any], rows: Rows, frame: Frame, codecs: CodecRegistry
) -> Callable[[Job], Any]:
    def before(job: Job) -> Any:
        prepared = rows.prepare([job.record], codecs)
        if prepared.rejected:
            cause = prepared.rejected[0][1]
            raise PayloadRejected(cause) from cause
        set_current_batch(Batch([job.record]))
        return prepared.table.to_pandas() if frame == "pandas" else prepared.table

    def after(returned: Any) -> Any:
        (outcome,) = per_row(returned, 1)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def run(job: Job) -> Any:
        return after(function(before(job)))

    async def run_async(job: Job) -> Any:
        return after(await function(before(job)))

    return run_async if inspect.iscoroutinefunction(function) else run
