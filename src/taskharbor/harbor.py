"""The app: declares jobs, enqueues them and runs them.

    harbor = Harbor("sqlite:///jobs.db")

    @harbor.job(max_attempts=3)
    async def greet(name: str) -> str:
        return f"Hello, {name}"

    greet.enqueue("Ada")

The app only combines `Client`, `Worker` and a driver. These know nothing of it.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import logging
import os
import pkgutil
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

import msgspec

from taskharbor.client import AsyncClient, Client, JobHandle
from taskharbor.clock import Clock
from taskharbor.codec import Arguments, Codec, CodecRegistry
from taskharbor.drivers.contract import FAILURE_TYPE, Driver, Enqueued
from taskharbor.drivers.registry import connect
from taskharbor.drivers.validation import listed
from taskharbor.errors import CodecError, Forbidden, InvalidRequest
from taskharbor.failures import FailureHandler, OnFailure, served_queues
from taskharbor.handlers import Handler, JobOptions, Lifespan, Options, check_options, check_result_bytes
from taskharbor.jobs import MAX_RESULT_BYTES, JobRequest, Micros
from taskharbor.queue_settings import QueueOptions, changing, declare
from taskharbor.requests import Defaults, EncodedPayload, RecordBuilder, wrong_row
from taskharbor.transactions import (
    AsyncJobWithin,
    AsyncTransaction,
    Calls,
    JobWithin,
    SyncTransaction,
    is_async,
)

if TYPE_CHECKING:
    from taskharbor.batch_jobs import BatchJobOptions, BatchJobType
    from taskharbor.middleware import Middleware
    from taskharbor.schedules.specification import ScheduleOptions, StoredSchedule
    from taskharbor.worker import Worker
    from taskharbor.worker.worker import WorkerOptions

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", Client, AsyncClient)
J = TypeVar("J", bound="JobType[..., Any]")

log = logging.getLogger("taskharbor")

DEFAULT_URL = "sqlite:///taskharbor.db"
URL_VARIABLE = "TASKHARBOR_URL"


class JobType(Generic[P, R]):
    """A declared job: the function, its name in the queue, and the calls that enqueue it. It keeps the function's parameter
    types."""

    def __init__(self, harbor: Harbor, handler: Handler, options: Options, result_type: Any) -> None:
        self._harbor = harbor
        self.handler = handler
        self._options = options
        self._result_type = result_type
        self.__wrapped__ = handler.function if handler.batch is None else handler.batch.function
        self.__doc__ = self.__wrapped__.__doc__
        self.__name__ = getattr(self.__wrapped__, "__name__", handler.type)

    @property
    def type(self) -> str:
        """The name of the job type in the queue."""
        return self.handler.type

    @property
    def function(self) -> Callable[P, Any]:
        """The decorated function."""
        return self.handler.function

    def options(self, **options: Unpack[Options]) -> typing.Self:
        """Return the same job with other options, for the calls that are made through the returned object.

        Args:
            options: `queue`, `priority`, `timeout`, `max_attempts`, `max_stalls`, `backoff` and `codec` replace those of the
                declaration. `delay` (seconds or a timedelta) or `run_at` (an aware datetime) let the job wait. `key` allows one
                waiting job of this key, which `update` says how to change. `idempotency_key` stores the job once. `headers` are
                texts for the handler and its middleware.

        Raises:
            InvalidRequest: A value is not allowed.
            TypeError: There is no option of this name.
        """
        check_options(typing.cast(dict[str, Any], options), Options, "a call")
        merged = typing.cast(Options, {**self._options, **options})
        self._harbor._builder.check(f"job {self.type!r}", self.type, merged)
        return self.__class__(self._harbor, self.handler, merged, self._result_type)

    def request(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest:
        """Return the call as a request for `harbor.enqueue_many`. It is checked against the signature and not sent."""
        try:
            payload = EncodedPayload(self._arguments.encode(self._codec, args, kwargs))
        except TypeError as misfit:
            for option in kwargs.keys() & Options.__annotations__.keys():
                hint = f"{option} is an option of the call: .options({option}=...).enqueue(...)"
                raise TypeError(f"{misfit}; {hint}") from None
            raise
        return JobRequest(type=self.handler.type, payload=payload, **self._options)

    @property
    def _arguments(self) -> Arguments:
        assert self.handler.arguments is not None
        return self.handler.arguments

    @property
    def _codec(self) -> Codec:
        return self._harbor.codecs.get(self._options.get("codec") or self._harbor.defaults.codec)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue the job with the arguments of its function.

        Returns:
            A handle on the job.

        Raises:
            InvalidRequest: The arguments do not fit the signature, or an option is out of bounds.
            BackendUnavailable: The backend does not answer.
        """
        return self._handles(self._harbor.client.enqueue_batch([self.request(*args, **kwargs)]))[0]

    async def enqueue_async(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The async form of `enqueue`."""
        client, request = self._harbor.async_client(), self.request(*args, **kwargs)
        return self._handles(await client.enqueue_batch([request]))[0]

    def handle(self, job_id: str) -> JobHandle[R]:
        """Return a handle on a job of this type by its id. Its result has the type that the function returns."""
        return JobHandle(self._harbor, job_id, result_type=self._result_type)

    @property
    def on_failure(self) -> OnFailure:
        """Declare a failure handler for jobs of this type: `@send.on_failure`. See `Harbor.on_failure`."""
        return OnFailure(self._harbor, job=self)

    def enqueue_many(self, calls: Calls) -> list[JobHandle[R]]:
        """Enqueue one job per item, in a few round trips. A tuple holds positional arguments, a mapping named ones.

        Rows are checked when this is called. For rows that a type checker checks too, give requests to `harbor.enqueue_many`:
        `[add.request(1, 2), add.request(3, 4)]`.

        Raises:
            InvalidRequest, TypeError: A row does not fit the signature. The message names it. Nothing is stored.
        """
        return self._handles(self._harbor.client.enqueue_like(self._template(), self._payloads(calls)))

    async def enqueue_many_async(self, calls: Calls) -> list[JobHandle[R]]:
        """The async form of `enqueue_many`."""
        client = self._harbor.async_client()
        return self._handles(await client.enqueue_like(self._template(), self._payloads(calls)))

    @overload
    def within(self, transaction: AsyncTransaction) -> AsyncJobWithin[P, R]: ...

    @overload
    def within(self, transaction: SyncTransaction) -> JobWithin[P, R]: ...

    def within(self, transaction: Any) -> JobWithin[P, R] | AsyncJobWithin[P, R]:
        """Enqueue as part of a transaction of yours. The job is stored if and only if the transaction commits.

        `send.within(session).enqueue(...)`; on an asynchronous connection or session, `await` it.
        """
        if is_async(transaction):
            return AsyncJobWithin(self, self._harbor.async_client().within(transaction))
        return JobWithin(self, self._harbor.client.within(transaction))

    def _template(self) -> JobRequest:
        return JobRequest(type=self.handler.type, **self._options)

    def _payloads(self, calls: Calls) -> list[bytes]:
        if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Iterable):
            raise TypeError(f"{calls!r} is not a list of calls: give one, as in [(1, 2), {{'a': 3, 'b': 4}}]")
        encode, codec = self._arguments.encode, self._codec
        payloads: list[bytes] = []
        try:
            payloads.extend(
                encode(codec, call, {}) if type(call) is tuple else encode(codec, *_as_call(call))
                for call in calls
            )
        except (TypeError, ValueError) as error:
            raise wrong_row(len(payloads), error) from error
        return payloads

    def _completed(self, request: JobRequest) -> JobRequest:
        """A request by type gets the options of the declaration, and its payload is checked as a call's arguments."""
        payload = {} if request.payload is None else request.payload
        if not isinstance(payload, Mapping):
            raise InvalidRequest(
                f"payload of type {type(payload).__name__} for the declared job {self.type!r}: give a mapping of its arguments"
            )
        asked = {name: getattr(request, name) for name in Options.__annotations__}
        given = {name: value for name, value in asked.items() if value is not None}
        # Not through `options`: the client checks them with the request.
        merged = typing.cast(Options, {**self._options, **given})
        try:
            job = self.__class__(self._harbor, self.handler, merged, self._result_type)
            return job.request(**payload)  # type: ignore[call-arg]
        except TypeError as error:
            raise InvalidRequest(f"job {self.type!r}: {error}") from None

    def _requests(self, calls: Calls) -> list[JobRequest]:
        replace, template = msgspec.structs.replace, self._template()
        return [replace(template, payload=EncodedPayload(data)) for data in self._payloads(calls)]

    def _handles(self, accepted: Iterable[Enqueued]) -> list[JobHandle[R]]:
        harbor, result_type = self._harbor, self._result_type
        return [JobHandle(harbor, one.id, one.existed, result_type) for one in accepted]

    if not TYPE_CHECKING:  # A checker would take it for a permission.

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a declared job has no attribute {name!r}: enqueue it with .enqueue(...), or later with "
                ".options(delay=...).enqueue(...)"
            )

    def __repr__(self) -> str:
        return f"<JobType {self.type}>"


def _as_call(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(call, Mapping):
        return (), dict(call)
    if isinstance(call, JobRequest):
        raise TypeError("a JobRequest is not a call: give requests to harbor.enqueue_many")
    if isinstance(call, (str, bytes)) or not isinstance(call, Sequence):
        raise TypeError(
            f"{call!r} is not a call: give a tuple of arguments, as in ({call!r},), or a mapping of named ones"
        )
    return tuple(call), {}


def _check_function(function: Any, type: str | None) -> None:
    """Refuse what a worker could not call."""
    if isinstance(function, str):
        instead = f"write @harbor.job(type={function!r})"
    elif isinstance(function, JobType):
        instead = "it is declared already, so declare the function itself under another type"
    elif not callable(function) or inspect.isclass(function) or not hasattr(function, "__name__"):
        instead = "put @harbor.job on a function"
    elif inspect.ismethod(function):
        instead = "a worker process has no object to call it on, so declare a function"
    elif function.__name__ == "<lambda>" and type is None:
        instead = "a lambda has no name, so write a function with def, or give a type"
    else:
        return
    raise InvalidRequest(f"{function!r} cannot be a job: {instead}")


class SyncJobType(JobType[P, R]):
    """A job declared on `def`. A call runs the function directly."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return typing.cast("R", self.handler.function(*args, **kwargs))


class AsyncJobType(JobType[P, R]):
    """A job declared on `async def`. A call returns the coroutine."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return typing.cast("Coroutine[Any, Any, R]", self.handler.function(*args, **kwargs))


def _request(type: str, payload: Any, options: Options) -> JobRequest:
    if not isinstance(type, str):
        raise InvalidRequest(
            f"{type!r} is not a type: give the text, or call .enqueue(...) on the declared job"
        )
    what = f"harbor.enqueue({type!r}), whose payload has the arguments"
    check_options(typing.cast(dict[str, Any], options), Options, what)
    return JobRequest(type=type, payload=payload, **options)


class _Declare(typing.Protocol):
    """The decorator that `@harbor.job(...)` returns. It keeps parameters and result, for `async def` and `def`."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> AsyncJobType[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, function: Callable[P, R]) -> SyncJobType[P, R]: ...


class Harbor:
    """One app on one store. Make it at import time; it connects on first use."""

    _client_types: tuple[type[Client], type[AsyncClient]] = (Client, AsyncClient)

    def __init__(
        self,
        url: str | Driver | None = None,
        *,
        queue: str = "default",
        codec: str = "json",
        max_attempts: int | None = None,
        timeout: timedelta | float | None = None,
        backoff: tuple[float, float] | None = None,
        middleware: Sequence[Middleware] = (),
        codecs: CodecRegistry | None = None,
        clock: Clock | None = None,
        max_result_bytes: int = MAX_RESULT_BYTES,
        lifespan: Lifespan | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        limits: dict[str, Any] = {"max_attempts": max_attempts, "timeout": timeout, "backoff": backoff}
        given = {name: value for name, value in limits.items() if value is not None}
        self.defaults = Defaults(queue=queue, codec=codec, **given)
        if codecs is not None and not isinstance(codecs, CodecRegistry):
            raise InvalidRequest(f"codecs {codecs!r}: give a CodecRegistry, as in CodecRegistry(MyCodec())")
        self.codecs = codecs or CodecRegistry()
        self._builder = RecordBuilder(self.defaults, self.codecs)
        self._builder.check("Harbor()", "any", {})
        self.middleware: list[Middleware] = listed("middleware", middleware)
        for one in [one for one in self.middleware if not callable(one)]:
            raise InvalidRequest(f"middleware {one!r}: give functions, as in async def trace(job, call_next)")
        check_result_bytes("Harbor()", max_result_bytes)
        self.max_result_bytes = max_result_bytes
        made = isinstance(lifespan, (AbstractContextManager, AbstractAsyncContextManager))
        if lifespan is not None and (made or not callable(lifespan)):
            raise InvalidRequest(
                f"lifespan {lifespan!r}: give the function that returns a context manager, and do not call it"
            )
        self.lifespan = lifespan
        """A function that returns a context manager, sync or async. A worker process enters it before its first job and leaves it
        after the last. The value is `current_job().state`."""
        self.handlers: dict[str, Handler] = {}
        self.jobs: dict[str, JobType[..., Any]] = {}
        """Declared jobs by their type."""
        self.failure_handlers: list[FailureHandler] = []
        self._imports: list[str] = list(listed("imports", imports))
        self.queues: list[str] = [queue]
        """The queues of this app's jobs: the default queue, and every queue that a declaration names."""
        self.declared_queues: dict[str, QueueOptions] = {}
        """Settings of queues, by `queue`. A worker applies them when it starts."""
        self.schedules: dict[str, functools.partial[StoredSchedule]] = {}
        """Declared schedules by name, without the time at which they begin. A worker stores them when it starts."""
        self.clock = clock
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient]
        self._async_clients = weakref.WeakKeyDictionary()
        self.url = url
        """The store that this app names itself. None: that of TASKHARBOR_URL, or a file in the current folder."""
        self.use(url if url is not None else os.environ.get(URL_VARIABLE) or DEFAULT_URL)

    def use(self, url: str | Driver) -> None:
        """Use another store: for tests, and for the command line's --url."""
        if not isinstance(url, (str, Driver)):
            raise InvalidRequest(f"store {url!r}: give a URL, as in sqlite:///jobs.db, or a driver")
        self._driver = connect(url) if isinstance(url, str) else url
        self._store = url
        self._client = None
        self._async_clients.clear()

    def driver(self) -> Driver:
        """A new handle on this app's store, not yet open."""
        process, child = map(sys.modules.get, ("multiprocessing.process", "taskharbor.worker.process_child"))
        is_main = process is not None and getattr(process.current_process(), "_inheriting", False)
        if is_main or getattr(child, "is_importing", False):
            # A script that enqueues or works at import would do so again in every process of its worker.
            raise RuntimeError(
                "this script is being imported by a worker process (isolation='process'), which must not enqueue or start "
                'a worker: put that part of it under `if __name__ == "__main__":`'
            )
        return self._driver.clone()

    @property
    def client(self) -> Client:
        """Return the client for synchronous code. There is one per process, shared by all threads."""
        with self._lock:
            if self._client is None:
                self._client = self._connected(self._client_types[0])
            return self._client

    def async_client(self) -> AsyncClient:
        """Return the client for the running event loop. There is one per loop, made on first use and closed with the loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._async_clients.get(loop)
            if client is None:
                client = self._async_clients[loop] = self._connected(self._client_types[1])
                client.close_with_loop()
            return client

    def _connected(self, kind: type[C]) -> C:
        return kind(
            self.driver(), defaults=self.defaults, codecs=self.codecs, clock=self.clock, queues=self.queues
        )

    def close(self) -> None:
        """Close the synchronous client's connection. The app can be used again afterwards."""
        with self._lock:
            held, self._client = self._client, None
        if held is not None:
            held.close()

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> typing.Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close_async()
        self.close()

    async def close_async(self) -> None:
        """The async form of `close`."""
        with self._lock:
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    # -- modules ------------------------------------------------------------------------------------------

    def discover(self, package: str) -> None:
        """Let a worker import the package and every module below it, for the jobs that they declare."""
        self._imports.append(f"{package}.*")

    def load(self, *modules: str) -> None:
        """Import the modules that declare this app's jobs: those of `imports` and `discover`, and these.

        A worker and the command line do so when they start. The modules may import the app.
        """
        pending, self._imports = [*self._imports, *modules], []
        for name in pending:
            try:
                found = import_module(name.removesuffix(".*"))
                if name.endswith(".*"):
                    for below in pkgutil.walk_packages(getattr(found, "__path__", ()), f"{found.__name__}."):
                        if not below.name.endswith(".__main__"):
                            import_module(below.name)
            except Exception as error:
                error.add_note(f"the app imports {name!r}: see its imports= and discover()")
                raise

    # -- declaring ----------------------------------------------------------------------------------------

    @overload
    def job(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncJobType[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def job(self, function: Callable[P, R], /) -> SyncJobType[P, R]: ...

    @overload
    def job(self, /, **options: Unpack[JobOptions]) -> _Declare: ...

    def job(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Declare a job on `async def` (runs on the event loop) or `def` (runs on a thread); bare or with options.

        Args:
            function: The handler.
            type: The name of the job in the queue. Default: the function's name.
            queue: The queue. Default: the app's.
            priority: A higher one runs first. Default: 0.
            max_attempts: The job is dead after so many executions. Default: the app's, which is 5.
            max_stalls: The job is dead after so many expired leases, which then spend no attempt. Default: 0, no such bound.
            timeout: Seconds or a timedelta for one execution. Default: the app's, which is none.
            backoff: The shortest and the longest delay of the default retry policy, in seconds. Default: (1, 3600).
            retry: The number of executions, as `max_attempts`, or a `RetryPolicy`.
            isolation: "loop", "thread" or "process".
            size: The number of places of a worker that one execution takes.
            on_invalid: "dead" or "complete": how a job ends whose payload does not fit.
            max_result_bytes: The longest encoded result that is kept. Default: the app's, which is 65,536.
            codec: "json", "msgpack", or one that was registered before. Default: the app's, which is json.
            cron: An expression, or several: a schedule of the job's name makes a job at each of these times. See `schedule`.
            every: A distance in seconds or as a timedelta, for a schedule likewise.
            zone: The zone of the cron expressions, as in "Europe/Berlin". Default: UTC.

        Raises:
            InvalidRequest: An option has a wrong value, or the function cannot be a job.
            TypeError: There is no option of this name.
        """
        check_options(options, JobOptions, "a job")
        declare = functools.partial(self._declare, typing.cast(JobOptions, options))
        return declare if function is None else declare(function)

    def _declare(self, options: JobOptions, function: Callable[..., Any]) -> JobType[..., Any]:
        type = options.get("type")
        _check_function(function, type)
        arguments = Arguments(function)
        if arguments.type.__struct_fields__[:1] in (("self",), ("cls",)):
            instead = "is a method, and a worker has no object to call it on: declare a function"
            raise InvalidRequest(f"{function!r} {instead}")
        type = function.__name__ if type is None else type
        handler = self._handler(
            options, type=type, function=function, arguments=arguments, lifespan=self.lifespan
        )
        result_type = typing.get_type_hints(function).get("return", Any)
        kind: Any = AsyncJobType if handler.is_async else SyncJobType
        declared: JobType[..., Any] = self._remember(kind, handler, options, result_type)
        times: Any = {name: options[name] for name in ("cron", "every", "zone") if name in options}
        if times:
            self.schedule(type, declared, **times)
        return declared

    def _handler(self, options: Mapping[str, Any], **own: Any) -> Handler:
        given = {"max_result_bytes": self.max_result_bytes, **options, **own}
        return Handler(**{name: given[name] for name in Handler.__struct_fields__ if name in given})

    @overload
    def batch_job(self, function: Callable[[Any], Any], /) -> BatchJobType[...]: ...

    @overload
    def batch_job(
        self, /, *, row: Callable[P, Any], **options: Unpack[BatchJobOptions]
    ) -> Callable[[Callable[[Any], Any]], BatchJobType[P]]: ...

    @overload
    def batch_job(
        self, /, **options: Unpack[BatchJobOptions]
    ) -> Callable[[Callable[[Any], Any]], BatchJobType[...]]: ...

    def batch_job(
        self,
        function: Callable[[Any], Any] | None = None,
        /,
        *,
        row: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """Declare a job whose handler takes a batch, as `pyarrow.Table` or `pandas.DataFrame` by its annotation.

        The handler returns None when all rows are done, or an outcome for each row: a result or an exception.

        Args:
            function: The handler.
            row: A dataclass, a struct or a TypedDict that every payload must fit. None takes any JSON object.
            options: Options of the declaration. `size` bounds the rows of one call.
        """
        from taskharbor.batch_jobs import BatchJobOptions, declare_batch_job

        check_options(options, BatchJobOptions, "a batch job")
        given = typing.cast(BatchJobOptions, options)

        def declare(decorated: Callable[[Any], Any]) -> Any:
            _check_function(decorated, given.get("type"))
            return declare_batch_job(self, decorated, row, given)

        return declare if function is None else declare(function)

    @property
    def on_failure(self) -> OnFailure:
        """Declare a function that runs when a job has died: `@harbor.on_failure`, bare or with options.

        The function takes a `FailedJob`. It runs as a job with options of its own: `max_attempts`, `retry`, `timeout` and others.
        `queue` and `job` restrict it to the jobs of a queue or of a type.
        """
        return OnFailure(self)

    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> None:
        """Declare a queue of this app with its settings: `harbor.queue("mail", max_inflight=5, failure_queue="failed")`.

        A worker applies a declared setting when it starts, if it differs from what was declared last. So it does not undo what an
        operator has changed since. The settings are those of `client.configure`.

        Raises:
            InvalidRequest: A value is out of bounds, or the queue is declared already.
        """
        changing(name, settings)
        if name in self.declared_queues:
            raise InvalidRequest(f"the queue {name!r} is declared already: give all its settings in one call")
        self.declared_queues[name] = settings
        if name not in self.queues:
            self.queues.append(name)

    def schedule(
        self,
        name: str,
        job: JobType[..., Any] | str,
        *,
        payload: Mapping[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Declare a schedule: `harbor.schedule("daily-report", report, cron="30 2 * * *", zone="Europe/Berlin")`.

        A worker stores it when it starts. A handler with a parameter `at` or `previous` gets the time of the tick, or of the one
        before, unless the payload gives the argument.

        Args:
            name: The name of the schedule in the store.
            job: The declared job, or its type.
            payload: A mapping of the job's arguments.
            options: Fields of `Schedule`: when (`cron` or `every`, `offset`, `zone`, `start`, `end`, `limit`, `jitter`), what
                happens to ticks that were missed (`catch_up`, `catch_up_mode`) or that come too early (`overlap`),
                `pause_on_failure`, `revision`, and options of the jobs: `queue`, `priority`, `timeout`, `max_attempts`,
                `max_stalls`, `backoff`, `headers`, `key`.

        Raises:
            InvalidRequest: A value is not allowed, or the schedule is declared already.
            TypeError: There is no option of this name.
        """
        from taskharbor.schedules.declarations import complete, origin_of
        from taskharbor.schedules.specification import Schedule

        if "lane" in options:
            raise InvalidRequest(f"schedule {name!r}: there are no lanes yet: leave out lane")
        if name in self.schedules:
            raise InvalidRequest(f"the schedule {name!r} is declared already; give this one another name")
        type = job if isinstance(job, str) else job.type
        caller = sys._getframe(1).f_globals["__name__"]
        module = self.jobs[type].__wrapped__.__module__ if type in self.jobs else caller
        schedule = Schedule(name=name, job=type, payload=payload, **options)
        self.schedules[name] = complete(self, schedule, origin_of(module))

    async def _on_start(self, driver: Driver, now: Micros) -> None:
        await self._declare_queues(driver, now)
        if self.schedules:
            from taskharbor.schedules.declarations import put_declared

            await put_declared(self, driver, now)

    async def _declare_queues(self, driver: Driver, now: Micros) -> None:
        for queue, settings in self.declared_queues.items():
            try:
                await declare(driver, queue, settings, now)
            except Forbidden as error:
                # Workers behind a broker need no right to change settings.
                log.warning("the declaration of queue %s is not applied: %s", queue, error)

    def _remember(self, kind: type[J], handler: Handler, options: Mapping[str, Any], result_type: Any) -> J:
        """Store a declared job. A wrong option is refused here, at the declaration, and not when the first job is enqueued."""
        if handler.type in self.handlers:
            raise InvalidRequest(
                f"a job of the type {handler.type!r} is declared already; give this one another: @harbor.job(type=...)"
            )
        kept = {option: value for option, value in options.items() if option in Options.__annotations__}
        self._builder.check(f"job {handler.type!r}", handler.type, kept)
        self.handlers[handler.type] = handler
        queue = kept.get("queue")
        if queue and queue not in self.queues:
            self.queues.append(queue)
        self.jobs[handler.type] = declared = kind(self, handler, typing.cast(Options, kept), result_type)
        return declared

    # -- by type: producers that do not have the code -------------------------------------------------------

    def enqueue(self, type: str, payload: Any = None, **options: Unpack[Options]) -> JobHandle[Any]:
        """Enqueue a job by its type. The payload is a mapping of its arguments.

        If this app declares the job, its options apply and the payload is checked.
        """
        return self.enqueue_many([_request(type, payload, options)])[0]

    async def enqueue_async(
        self, type: str, payload: Any = None, **options: Unpack[Options]
    ) -> JobHandle[Any]:
        """The async form of `enqueue`."""
        return (await self.enqueue_many_async([_request(type, payload, options)]))[0]

    def enqueue_many(self, requests: Iterable[JobRequest]) -> list[JobHandle[Any]]:
        """Enqueue requests of any types: `[add.request(1, 2), greet.request("Ada")]`."""
        accepted = self.client.enqueue_many(self._checked(requests))
        return [JobHandle(self, one.id, one.existed) for one in accepted]

    async def enqueue_many_async(self, requests: Iterable[JobRequest]) -> list[JobHandle[Any]]:
        """The async form of `enqueue_many`."""
        accepted = await self.async_client().enqueue_many(self._checked(requests))
        return [JobHandle(self, one.id, one.existed) for one in accepted]

    def _checked(self, requests: Iterable[JobRequest]) -> list[JobRequest]:
        asked, checked = list(requests), list[JobRequest]()
        try:
            for one in asked:
                is_open = isinstance(one, JobRequest) and not isinstance(one.payload, EncodedPayload)
                if is_open and one.type not in self.jobs:
                    self.load()  # The modules of `imports` may declare it.
                declared = self.jobs.get(one.type) if is_open else None
                checked.append(one if declared is None else declared._completed(one))
        except (InvalidRequest, CodecError) as error:
            raise error if len(asked) == 1 else wrong_row(len(checked), error) from None
        return checked

    def require(self, type: str) -> None:
        """Raise InvalidRequest if the app declares no job of this type. The message names one that is spelled like it."""
        if type not in self.jobs:
            near = difflib.get_close_matches(str(type), self.jobs, n=1, cutoff=0.5)
            what = f"did you mean {near[0]!r}?" if near else f"it declares {', '.join(self.jobs) or 'none'}"
            raise InvalidRequest(f"the app declares no job {type!r}: {what}")

    def handle(self, job_id: str) -> JobHandle[Any]:
        """Return a handle on a job by its id."""
        return JobHandle(self, job_id)

    # -- running ------------------------------------------------------------------------------------------

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker for this app's jobs. The options are those of `Worker`.

        Raises:
            InvalidRequest: The app declares no job.
        """
        from taskharbor.worker import Worker

        self.load()
        if not self.handlers and not options.get("every_type"):
            raise InvalidRequest(
                "this app declares no job, so a worker has nothing to run: import the modules that declare its jobs, as in "
                'Harbor(imports=["shop.mail"])'
            )
        for type in listed("types", options.get("types") or ()):
            self.require(type)
        if self.failure_handlers:
            options["queues"] = served_queues(self, options.get("queues", self.queues))
            if types := options.get("types"):
                options["types"] = [
                    *types,
                    FAILURE_TYPE,
                    *(one.request.type for one in self.failure_handlers),
                ]
        if options.get("heartbeat_process") is True and isinstance(self._store, str):
            options["heartbeat_process"] = self._store
        of_app: WorkerOptions = {
            "queues": self.queues,
            "middleware": self.middleware,
            "codecs": self.codecs,
            "clock": self.clock,
            "lifespan": self.lifespan,
            "on_start": self._on_start,
        }
        worker = Worker(self.driver(), **typing.cast("WorkerOptions", {**of_app, **options}))
        for handler in self.handlers.values():
            worker.add_handler(handler)
        known = {*self.queues, *(one.get("failure_queue") for one in self.declared_queues.values())}
        wanted = [*worker.config.queues, *(one.queue for one in self.failure_handlers if one.queue)]
        if unknown := ", ".join(queue for queue in wanted if queue not in known):
            # A warning: a call's own options may name any queue.
            log.warning("no job of the app is in queue %s; the app has %s", unknown, ", ".join(self.queues))
        return worker

    def __repr__(self) -> str:
        return f"<Harbor with {len(self.handlers)} jobs>"
