"""`@harbor.batch_job`: the declared batch job, its options, and the handler made of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

from taskharbor.batch_jobs.rows import BatchCall, JobColumn, Rows, per_row
from taskharbor.codec import CodecRegistry
from taskharbor.errors import InvalidRequest
from taskharbor.handlers import DeclaredOptions, Handler, Options, make_handler
from taskharbor.harbor import JobType
from taskharbor.middleware import Batch, Job, PayloadRejected, Raised, set_current_batch

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor

P = ParamSpec("P")

DEFAULT_SIZE = 5000
LARGEST_SIZE = 100_000

_FRAMES = {"Table": "pyarrow", "DataFrame": "pandas"}


class BatchJobOptions(DeclaredOptions, total=False):
    """Options of `@harbor.batch_job(...)` beside `row`."""

    size: int
    job_columns: Sequence[JobColumn]


class BatchJobType(JobType[P, Any], Generic[P]):
    """A declared batch job. It is enqueued row by row, with the fields of its row type, and run in batches. A call with a frame
    runs the function directly."""

    def __init__(self, harbor: Harbor, handler: Handler, options: Options, result_type: Any) -> None:
        super().__init__(harbor, handler, options, result_type)
        assert handler.batch is not None
        self._batch = handler.batch
        function = handler.batch.function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", handler.type)
        self.__wrapped__ = function

    @property
    def _arguments(self) -> Any:
        return self._batch.rows

    def __call__(self, frame: Any) -> Any:
        return self._batch.function(frame)


def declare_batch_job(
    harbor: Harbor, function: Callable[[Any], Any], row: Callable[P, Any] | None, options: BatchJobOptions
) -> BatchJobType[P]:
    name = options.get("name") or function.__name__
    size = options.get("size", DEFAULT_SIZE)
    if not 1 <= size <= LARGEST_SIZE:
        raise InvalidRequest(f"{name!r}: size {size}: from 1 to {LARGEST_SIZE}")
    call = BatchCall(
        function=function,
        rows=Rows(name, row, options.get("job_columns", ())),
        takes_pandas=_library(name, function) == "pandas",
        size=size,
    )
    handler = make_handler(
        name,
        _job_by_job(call, harbor.codecs),
        retry=options.get("retry"),
        on_invalid=options.get("on_invalid", "dead"),
        batch=call,
    )
    return BatchJobType(harbor, handler, harbor.remember(handler, options), Any)


def _library(type: str, function: Callable[[Any], Any]) -> str:
    """Return the library of the annotated frame. An annotation may be a text, so that the import is for type checkers only."""
    parameters = list(inspect.signature(function).parameters.values())
    annotation = parameters[0].annotation if len(parameters) == 1 else None
    if isinstance(annotation, str):
        library = _FRAMES.get(annotation.rpartition(".")[2])
    else:
        library = _FRAMES.get(getattr(annotation, "__name__", ""))
        if library is not None and not annotation.__module__.startswith(library):
            library = None
    if library is None:
        raise InvalidRequest(
            f"{type!r}: a batch handler takes one parameter, annotated pyarrow.Table or pandas.DataFrame: "
            "that is what it is given"
        )
    return library


def _job_by_job(call: BatchCall, codecs: CodecRegistry) -> Callable[[Job], Any]:
    def before(job: Job) -> Any:
        prepared = call.rows.prepare([job.record], codecs)
        if prepared.rejected:
            cause = prepared.rejected[0][1]
            raise PayloadRejected(cause) from cause
        set_current_batch(Batch([job.record]))
        return prepared.table

    def after(returned: Any) -> Any:
        (outcome,) = per_row(returned, 1)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def run(job: Job) -> Any:
        return after(call(before(job)))

    async def run_async(job: Job) -> Any:
        return after(await call(before(job)))

    return run_async if inspect.iscoroutinefunction(call.function) else run
