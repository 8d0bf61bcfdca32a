"""Batch handlers: many jobs as one Arrow table or pandas frame, in one call, with an outcome for every row.

Payloads of one job type become rows of a table, each checked on its own; the handler's return value becomes one outcome per row.
`@harbor.batch_job` declares such a job. The worker runs batches with `taskharbor.worker.run.BatchRunner`.

- `columns`: payloads as the columns of a table. It needs Arrow, which is an extra.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, get_args

import msgspec

from taskharbor.codec import Codec, CodecRegistry, encode_checked
from taskharbor.errors import CodecError, InvalidRequest, MissingExtra, PayloadInvalid
from taskharbor.handlers import DeclaredOptions
from taskharbor.harbor import Harbor, JobType
from taskharbor.jobs import JobRecord
from taskharbor.middleware import Batch, Job, PayloadRejected, Raised, current_batch, set_current_batch

__all__ = ["Batch", "current_batch"]

P = ParamSpec("P")

DEFAULT_SIZE = 5000
LARGEST_SIZE = 100_000

_FRAMES = {"Table": "pyarrow", "DataFrame": "pandas"}

JobColumn: TypeAlias = Literal[
    "job_id", "queue", "key", "attempt", "max_attempts", "fence", "created_at", "run_at"
]
JOB_COLUMNS: tuple[str, ...] = get_args(JobColumn)


def require_arrow() -> ModuleType:
    """Return the module that makes columns. Raises MissingExtra without pyarrow."""
    try:
        from taskharbor.batch_jobs import columns
    except ImportError as missing:
        raise MissingExtra("batch jobs need pyarrow: pip install 'taskharbor[spark]'") from missing
    return columns


class BatchCall(msgspec.Struct, frozen=True, kw_only=True):
    """The code behind a batch job, and the number of rows that it takes at once."""

    function: Callable[[Any], Any]
    rows: Rows
    takes_pandas: bool
    size: int

    def __call__(self, table: Any) -> Any:
        return self.function(table.to_pandas() if self.takes_pandas else table)

    @staticmethod
    def outcomes(returned: Any, count: int) -> list[Any]:
        """Return the result of every row, or `Raised` for an exception. None from the handler means that all rows are done."""
        if returned is None:
            return [None] * count
        outcomes = _as_list(returned)
        if len(outcomes) != count:
            raise OutcomesMismatch(
                f"the handler returned {len(outcomes)} outcomes for {count} rows: return one for each, or None if all are done"
            )
        return [Raised(outcome) if isinstance(outcome, BaseException) else outcome for outcome in outcomes]


class Prepared(msgspec.Struct):
    """A batch that is ready for the handler."""

    table: Any
    """An Arrow table. Only `columns` imports Arrow, because it is an extra."""
    kept: list[int]
    """Indexes of the jobs that became rows, in the table's order."""
    rejected: list[tuple[int, CodecError]]


class Rows:
    """Payloads of one job type. `row` is a dataclass, a msgspec struct or a TypedDict that every payload must fit; None takes any
    JSON object as it is."""

    def __init__(self, type: str, row: Callable[..., Any] | None, job_columns: Sequence[str] = ()) -> None:
        self._name = type
        self._row = row
        self._payload_type: Any = dict[str, Any] if row is None else row
        self._hints = None if row is None else _hints(type, row)
        self._job_columns = tuple(job_columns)
        unknown = set(job_columns) - set(JOB_COLUMNS)
        if unknown:
            raise InvalidRequest(
                f"{type!r}: no column {', '.join(sorted(unknown))} of the job; there are {', '.join(JOB_COLUMNS)}"
            )
        twice = set(job_columns) & set(self._hints or ())
        if twice:
            raise InvalidRequest(
                f"{type!r}: {', '.join(sorted(twice))} is a payload field and a column of the job: leave one out"
            )

    def encode(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Encode one row as a payload and check it."""
        if self._row is not None:
            value = self._row(*args, **kwargs)
        elif args and not (len(args) == 1 and isinstance(args[0], Mapping) and not kwargs):
            raise TypeError(
                f"{self._name}: name the fields, as in enqueue(order=1), or declare it with row=..."
            )
        else:
            value = dict(args[0]) if args else kwargs
        return encode_checked(codec, value, self._payload_type, self._name)

    def prepare(self, records: Sequence[JobRecord], codecs: CodecRegistry) -> Prepared:
        """Make a table of the payloads. A payload that does not fit is left out, with the reason."""
        kept: list[int] = []
        values: list[Any] = []
        rejected: list[tuple[int, CodecError]] = []
        for index, record in enumerate(records):
            try:
                values.append(codecs.get(record.codec).decode(record.payload, self._payload_type))
            except CodecError as misfit:
                rejected.append((index, misfit))
            else:
                kept.append(index)
        arrow = require_arrow()
        while True:
            columns, misfits = arrow.columns_of_rows(values, self._fields(values))
            if not misfits:
                break
            rejected += [(kept[index], PayloadInvalid(reason)) for index, reason in misfits.items()]
            kept = [one for index, one in enumerate(kept) if index not in misfits]
            values = [one for index, one in enumerate(values) if index not in misfits]
        columns |= arrow.columns_of_jobs(self._job_columns, [records[index] for index in kept])
        return Prepared(arrow.as_table(columns, len(kept)), kept, rejected)

    def _fields(self, values: list[Any]) -> Mapping[str, Any]:
        if self._hints is not None:
            return self._hints
        # In the order of their first appearance.
        return {name: None for value in values for name in value if name not in self._job_columns}


def _hints(type: str, row: Callable[..., Any]) -> dict[str, Any]:
    if not inspect.isclass(row):
        raise InvalidRequest(
            f"{type!r}: row={row!r} is no class: give a dataclass, a msgspec.Struct or a TypedDict"
        )
    try:
        hints = typing.get_type_hints(row, include_extras=True)
    except NameError as unknown:
        raise InvalidRequest(
            f"{type!r}: cannot read the type hints of {row.__qualname__} ({unknown}); import the types at run time"
        ) from unknown
    hints = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    if not hints:
        raise InvalidRequest(
            f"{type!r}: row={row.__qualname__} declares no fields: give a dataclass, a msgspec.Struct or a TypedDict"
        )
    return hints


# -- outcomes -----------------------------------------------------------------------------------------------


class OutcomesMismatch(TypeError):
    """The handler's return value does not fit its rows. All of them count as failed."""


def _as_list(returned: Any) -> list[Any]:
    # Arrays and tables of Arrow, then of numpy and pandas. Their values become Python's, so that they can be encoded.
    if hasattr(returned, "to_pylist"):
        return list(returned.to_pylist())
    if hasattr(returned, "to_dict") and hasattr(returned, "columns"):
        return list(returned.to_dict("records"))
    if hasattr(returned, "tolist"):
        values = returned.tolist()
        if isinstance(values, list):
            return values
    if isinstance(returned, (list, tuple)):
        return list(returned)
    kind = "a mapping" if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
    raise OutcomesMismatch(
        f"the handler returned {kind}: return None if all rows are done, or a list, an array or a Series with one outcome each"
    )


# -- declaring ----------------------------------------------------------------------------------------------


class BatchJobOptions(DeclaredOptions, total=False):
    """Options of `@harbor.batch_job(...)` beside `row`."""

    size: int
    job_columns: Sequence[JobColumn]


class BatchJobType(JobType[P, Any], Generic[P]):
    """A declared batch job. It is enqueued row by row, with the fields of its row type, and run in batches. A call with a frame
    runs the function directly."""

    @property
    def _arguments(self) -> Any:
        assert self.handler.batch is not None
        return self.handler.batch.rows

    def __call__(self, frame: Any) -> Any:
        return self.__wrapped__(frame)


def declare_batch_job(
    harbor: Harbor, function: Callable[[Any], Any], row: Callable[P, Any] | None, options: BatchJobOptions
) -> BatchJobType[P]:
    name = options.get("type") or function.__name__
    size = options.get("size", DEFAULT_SIZE)
    if not 1 <= size <= LARGEST_SIZE:
        raise InvalidRequest(f"{name!r}: size {size}: from 1 to {LARGEST_SIZE}")
    call = BatchCall(
        function=function,
        rows=Rows(name, row, options.get("job_columns", ())),
        takes_pandas=_library(name, function) == "pandas",
        size=size,
    )
    function = _job_by_job(call, harbor.codecs)
    handler = harbor._handler(options, type=name, function=function, batch=call, size=1)
    declared: BatchJobType[P] = harbor._remember(BatchJobType, handler, options, Any)
    return declared


def _library(type: str, function: Callable[[Any], Any]) -> str:
    """Return the library of the annotated frame. An annotation may be a text, so that the import is for type checkers only."""
    parameters = list(inspect.signature(function).parameters.values())
    annotation = parameters[0].annotation if len(parameters) == 1 else None
    is_text = isinstance(annotation, str)
    name = str(annotation if is_text else getattr(annotation, "__name__", ""))
    library = _FRAMES.get(name.rpartition(".")[2])
    if library is None or not (is_text or annotation.__module__.startswith(library)):
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
        (outcome,) = call.outcomes(returned, 1)
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def run(job: Job) -> Any:
        return after(call(before(job)))

    async def run_async(job: Job) -> Any:
        return after(await call(before(job)))

    return run_async if inspect.iscoroutinefunction(call.function) else run
