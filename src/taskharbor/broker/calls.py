"""The driver protocol, server side: every method of the contract as `POST /v1/driver/<operation>`.

A call is exactly the contract's, `now` included, and so is what it does: this only reads, checks, calls and writes. See
`taskharbor.drivers.http.protocol` for what goes over the wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taskharbor.broker import bounds
from taskharbor.broker.exchange import read_body
from taskharbor.broker.gate import CALLER
from taskharbor.broker.gone import Departure
from taskharbor.broker.problems import Problem
from taskharbor.broker.replays import Name, Replays, heard_names, request_name
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import Scope
from taskharbor.drivers.contract import AttemptPage, Page, QueueSettings, QueueStats, Release
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.http.item_errors import ItemError, split_errors
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Attempt, JobRecord, Micros

SCOPES: dict[str, Scope] = {
    "hello": "read",
    "time": "read",
    "enqueue": "produce",
    "reserve": "work",
    "extend_lease": "work",
    "settle": "work",
    "reclaim": "work",
    # Workers sweep: what is due by a queue's own settings goes, and nothing else.
    "prune": "work",
    "wait": "work",
    "cancel": "admin",
    "requeue": "admin",
    "purge": "admin",
    "configure": "admin",
    "get": "read",
    "list_jobs": "read",
    "stats": "read",
    "settings": "read",
    "read_attempts": "read",
    "job_attempts": "read",
}

_JSON = "application/json"


def driver_routes(service: Service) -> list[Route]:
    calls = DriverCalls(service)
    return [Route(f"{wire.PATH}{{operation}}", calls.answer, methods=["POST"])]


class DriverCalls:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._driver = service.driver
        self._config = service.config
        self.replays = Replays()
        self._carried_out: dict[str, tuple[wire.Operation[Any, Any], Callable[[Any], Awaitable[Any]]]] = {
            operation.name: (operation, carry_out)
            for operation, carry_out in (
                (wire.HELLO, self._hello),
                (wire.TIME, self._time),
                (wire.ENQUEUE, self._enqueue),
                (wire.RESERVE, self._reserve),
                (wire.EXTEND_LEASE, self._extend_lease),
                (wire.SETTLE, self._settle),
                (wire.RECLAIM, self._reclaim),
                (wire.CANCEL, self._cancel),
                (wire.REQUEUE, self._requeue),
                (wire.PURGE, self._purge),
                (wire.PRUNE, self._prune),
                (wire.GET, self._get),
                (wire.LIST_JOBS, self._list_jobs),
                (wire.STATS, self._stats),
                (wire.CONFIGURE, self._configure),
                (wire.SETTINGS, self._settings),
                (wire.READ_ATTEMPTS, self._read_attempts),
                (wire.JOB_ATTEMPTS, self._job_attempts),
                (wire.WAIT, self._wait),
            )
        }

    async def answer(self, request: Request) -> Response:
        operation, carry_out = self._carried_out[request.path_params["operation"]]
        is_json = _is_json(request)
        body = await read_body(request.receive)
        try:
            call = (operation.read_call_json if is_json else operation.read_call)(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Problem(
                422,
                "invalid_request",
                f"this is no call of {operation.name}: {error}",
                hint="a client of another version? use the same version of TaskHarbor at both ends",
            ) from None
        if operation is wire.WAIT:
            # A wait is given up when its client goes away: it would hold a place that others want.
            with Departure(request) as departure:
                return _response(await departure.unless_left(self._wait(call)), is_json)
        if not operation.is_change:
            return _response(await carry_out(call), is_json)
        caller = request.scope[CALLER].name
        self.replays.heard(caller, heard_names(request.headers.get(wire.HEARD)))
        name = request_name(caller, request.headers.get(wire.REQUEST_ID))
        if name is None:
            return _response(await carry_out(call), is_json)
        replay = await self.replays.once(name, operation.name, lambda: carry_out(call))
        answer = replay.answer
        if replay.is_repeated and operation is wire.RESERVE:
            answer = await self._reserve_again(name, call, answer)
        response = _response(answer, is_json)
        self.replays.weigh(name, len(response.body))
        return response

    # -- life -----------------------------------------------------------------------------------------------

    async def _hello(self, call: wire.NoArguments) -> wire.Hello:
        return wire.Hello(
            version=wire.VERSION,
            capabilities=self._driver.capabilities,
            max_batch=self._config.max_batch,
            max_body=self._config.max_body_bytes,
            max_wait=self._config.max_wait_seconds,
        )

    async def _time(self, call: wire.NoArguments) -> Micros:
        return self._service.now()

    # -- producing and working ------------------------------------------------------------------------------

    async def _enqueue(self, call: wire.EnqueueCall) -> wire.Existing:
        # Whoever sends a million jobs stamps the last of them with the time of the first, which harms nobody.
        self._check_now(call.now, may_be_past=True)
        self._check_batch(len(call.records))
        bounds.check_records(call.records)
        return wire.Existing.of(await self._driver.enqueue(call.records, now=call.now, new_ids=call.new_ids))

    async def _reserve(self, call: wire.ReserveCall) -> list[JobRecord]:
        self._check_now(call.now)
        bounds.check_names((call.queue, call.worker))
        return await self._driver.reserve(
            call.queue,
            limit=min(call.limit, self._config.max_batch),
            lease_for=call.lease_for,
            now=call.now,
            worker=call.worker,
            types=call.types,
        )

    async def _reserve_again(
        self, name: Name, call: wire.ReserveCall, jobs: list[JobRecord]
    ) -> list[JobRecord]:
        """The client did not hear of these jobs. What it does not want any more goes back unspent."""
        self._check_now(call.now)
        if any(job.expires_at_us is None or job.expires_at_us <= call.now for job in jobs):
            # Too late: those leases are over, and a new reserve deals with them.
            self.replays.forget(name)
            replay = await self.replays.once(name, wire.RESERVE.name, lambda: self._reserve(call))
            return cast("list[JobRecord]", replay.answer)
        wanted = [job for job in jobs if call.types is None or job.type in call.types][: call.limit]
        if len(wanted) < len(jobs):
            kept = {job.id for job in wanted}
            unwanted = [Release(job.id, job.token or "") for job in jobs if job.id not in kept]
            self.replays.replace(name, wanted)
            await self._driver.settle(unwanted, now=call.now)
        return wanted

    async def _extend_lease(self, call: wire.ExtendCall) -> wire.Leases:
        self._check_now(call.now)
        self._check_batch(len(call.extensions))
        bounds.check_extensions(call.extensions)
        answers = await self._driver.extend_lease(call.extensions, lease_for=call.lease_for, now=call.now)
        return wire.Leases(*split_errors(answers))

    async def _settle(self, call: wire.SettleCall) -> wire.Refused:
        self._check_now(call.now)
        batch = call.settlements.batch()
        self._check_batch(len(batch))
        bounds.check_settlements(call.settlements)
        answers = await self._driver.settle(batch, now=call.now)
        if not any(answers):
            return wire.Refused()
        return wire.Refused({n: ItemError.of(error) for n, error in enumerate(answers) if error is not None})

    async def _reclaim(self, call: wire.ReclaimCall) -> int:
        self._check_now(call.now)
        return await self._driver.reclaim(now=call.now, queue=call.queue, limit=call.limit)

    # -- operating ------------------------------------------------------------------------------------------

    async def _cancel(self, call: wire.JobsCall) -> wire.States:
        self._check_now(call.now)
        self._check_batch(len(call.job_ids))
        return wire.States(*split_errors(await self._driver.cancel(call.job_ids, now=call.now)))

    async def _requeue(self, call: wire.JobsCall) -> wire.States:
        self._check_now(call.now)
        self._check_batch(len(call.job_ids))
        return wire.States(*split_errors(await self._driver.requeue(call.job_ids, now=call.now)))

    async def _purge(self, call: wire.PurgeCall) -> int:
        bounds.check_filter(call.selection)
        return await self._driver.purge(call.selection, limit=call.limit)

    async def _prune(self, call: wire.PruneCall) -> int:
        self._check_now(call.now)
        return await self._driver.prune(now=call.now, limit=call.limit)

    async def _configure(self, call: wire.ConfigureCall) -> None:
        self._check_now(call.now)
        bounds.check_settings(call.queue, call.settings)
        await self._driver.configure(call.queue, call.settings, now=call.now)

    # -- looking --------------------------------------------------------------------------------------------

    async def _get(self, call: wire.JobsCall) -> list[JobRecord | None]:
        bounds.check_instant("now", call.now)
        self._check_batch(len(call.job_ids))
        return await self._driver.get(call.job_ids, now=call.now)

    async def _list_jobs(self, call: wire.ListCall) -> Page:
        bounds.check_instant("now", call.now)
        bounds.check_filter(call.selection)
        limit = min(call.limit, self._config.max_batch)
        return await self._driver.list_jobs(call.selection, now=call.now, limit=limit, cursor=call.cursor)

    async def _stats(self, call: wire.StatsCall) -> list[QueueStats]:
        bounds.check_instant("now", call.now)
        return await self._driver.stats(now=call.now, queue=call.queue)

    async def _settings(self, call: wire.SettingsCall) -> QueueSettings:
        return await self._driver.settings(call.queue)

    async def _read_attempts(self, call: wire.ReadAttemptsCall) -> AttemptPage:
        limit = min(call.limit, self._config.max_batch)
        return await self._driver.read_attempts(after=call.after, limit=limit)

    async def _job_attempts(self, call: wire.JobAttemptsCall) -> list[Attempt]:
        return await self._driver.job_attempts(call.job_id)

    async def _wait(self, call: wire.WaitCall) -> wire.Woken:
        self._check_now(call.now)
        self._check_batch(len(call.queues))
        bounds.check_names(call.queues)
        return wire.Woken(
            *await self._service.wakes.wait(call.queues, call.seen, now=call.now, timeout=call.timeout)
        )

    # -- checks ---------------------------------------------------------------------------------------------

    def _check_now(self, now: Micros, *, may_be_past: bool = False) -> None:
        """A client whose clock is wrong could end leases of others, or run jobs early."""
        bounds.check_instant("now", now)
        if self._config.trust_client_time:
            return
        skew = now - self._service.now()
        if abs(skew) > self._config.max_skew_us and not (may_be_past and skew < 0):
            raise Problem(
                422,
                "clock_skew",
                f"the call says it is {abs(skew) / SECOND:.1f} s {'later' if skew > 0 else 'earlier'} than it is here",
                hint="take the time from this broker (the operation `time`), not from a clock of your own",
            )

    def _check_batch(self, count: int) -> None:
        if count > self._config.max_batch:
            raise InvalidRequest(
                f"{count} in one call: at most {self._config.max_batch}; make several calls of it"
            )


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in (wire.MSGPACK, _JSON):
        return kind == _JSON
    raise Problem(
        415,
        "unsupported_media_type",
        f"the body must be {wire.MSGPACK} or {_JSON}, and Content-Type must say so",
    )


def _response(answer: Any, is_json: bool) -> Response:
    if is_json:
        return Response(wire.encode_json(answer), media_type=_JSON)
    return Response(wire.encode(answer), media_type=wire.MSGPACK)
