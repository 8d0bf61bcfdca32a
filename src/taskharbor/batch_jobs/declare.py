"""`@harbor.batch_job`: the declared batch job, and what its declaration accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict

from taskharbor.batch_jobs.handler import DEFAULT_SIZE, BatchHandler, make_batch_handler
from taskharbor.batch_jobs.rows import JobColumn
from taskharbor.handlers import Handler, OnInvalid, Options
from taskharbor.harbor import JobType
from taskharbor.retry import RetryPolicy

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor

P = ParamSpec("P")


class BatchJobOptions(TypedDict, total=False):
    """What `@harbor.batch_job(...)` accepts beside `row`."""

    size: int
    job_columns: Sequence[JobColumn]
    name: str
    queue: str
    priority: int
    timeout: timedelta | float
    max_attempts: int
    max_stalls: int
    backoff: tuple[float, float]
    retry: RetryPolicy
    on_invalid: OnInvalid
    codec: str


class BatchJobType(JobType[P, Any], Generic[P]):
    """Enqueued row by row, with the fields of its row type; run by the batch. Calling it with a frame runs it here and now."""

    def __init__(self, harbor: Harbor, handler: Handler, options: Options, result_type: Any) -> None:
        super().__init__(harbor, handler, options, result_type)
        assert isinstance(handler, BatchHandler)
        function = handler.batch_function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", handler.type)
        self.__wrapped__ = function

    @property
    def _arguments(self) -> Any:
        assert isinstance(self.handler, BatchHandler)
        return self.handler.rows

    def __call__(self, frame: Any) -> Any:
        assert isinstance(self.handler, BatchHandler)
        return self.handler.batch_function(frame)


def declare_batch_job(
    harbor: Harbor, function: Callable[[Any], Any], row: Callable[P, Any] | None, options: BatchJobOptions
) -> BatchJobType[P]:
    handler = make_batch_handler(
        options.get("name") or function.__name__,
        function,
        codecs=harbor.codecs,
        row=row,
        size=options.get("size", DEFAULT_SIZE),
        job_columns=options.get("job_columns", ()),
        retry=options.get("retry"),
        on_invalid=options.get("on_invalid", "dead"),
    )
    return BatchJobType(harbor, handler, harbor.remember(handler, options), Any)
