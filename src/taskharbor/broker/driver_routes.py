"""The driver protocol, server side: every operation of the contract as `POST /v1/driver/<operation>`.

A call is the contract's, and so is what it does: this only reads, checks, runs and writes. The broker's clock takes the place of
the client's `now`. See `taskharbor.drivers.operations` for the calls, and `taskharbor.drivers.broker_protocol` for their form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker.admission import CALLER, Endpoint, ServedPath
from taskharbor.broker.calls import check_queues
from taskharbor.broker.error_responses import Problem, invalid
from taskharbor.broker.idempotency import Replays, RequestName
from taskharbor.broker.job_routes import check_worker
from taskharbor.broker.request_response import unless_left, watched_client
from taskharbor.broker.routes import JSON, checked_media_type
from taskharbor.broker.runtime import Service
from taskharbor.broker.tokens import Caller
from taskharbor.drivers import broker_protocol as wire
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Release
from taskharbor.drivers.records import Greeting
from taskharbor.drivers.validation import check_texts
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobRecord

_READ: dict[str, Any] = {wire.MSGPACK: wire.READ_CALL, JSON: wire.READ_CALL_JSON}
_WRITE = {wire.MSGPACK: wire.encode, JSON: wire.encode_json}


def driver_paths(service: Service) -> list[tuple[ServedPath, Endpoint]]:
    """The paths of the driver protocol."""
    calls = DriverCalls(service)
    return [
        (ServedPath("POST", f"{wire.PATH}{name}", operation.scope), partial(calls.answer, operation))
        for name, operation in op.OPERATIONS.items()
    ]


class DriverCalls:
    """Carries out calls of the driver contract for clients."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._config = service.config
        self.replays = Replays()

    async def answer(
        self, operation: type[op.Operation[Any]], request: Request, names: dict[str, str]
    ) -> Response:
        """Answer one call. Raises `Problem` if it is refused."""
        kind = checked_media_type(request, wire.MSGPACK, JSON)
        body = await request.body()
        try:
            call = _READ[kind][operation.name](body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = "a client of another version? use the same version of TaskHarbor at both ends"
            raise invalid(f"this is no call of {operation.name}: {error}", hint) from None
        caller: Caller = request.scope[CALLER]
        self._check(call)
        check_texts(call)
        given = request.headers.get(wire.REQUEST_ID) if call.changes else None
        if call.changes:
            self.replays.heard(caller.name, request.headers.get(wire.HEARD, ""))
        if isinstance(call, op.Wait):
            check_queues(caller, call.queues)
            # A wait is given up when its client goes away: it would hold a place that others want.
            with watched_client(request) as left:
                answer: Any = await unless_left(left, self._service.long_polls.wait(call, caller.name))
        elif given is None:
            answer = await self._run(caller, call)
        else:
            name = (caller.name, given)
            answer, is_repeated = await self.replays.once(
                name, call.name, lambda: self._run(caller, call), partial(self._still_holds, call)
            )
            if is_repeated and isinstance(call, op.Reserve):
                answer = await self._without_unwanted(name, call, answer)
        data = _WRITE[kind](answer)
        if given is not None:
            self.replays.weigh((caller.name, given), len(data))
        return Response(data, media_type=kind)

    async def _run(self, caller: Caller, call: op.Operation[Any]) -> Any:
        service, config = self._service, self._config
        if isinstance(call, op.Hello):
            return Greeting(
                version=wire.VERSION,
                capabilities=replace(service.driver.capabilities, ticks_schedules=service.sweeps),
                max_batch=config.max_batch,
                max_body=config.max_body_bytes,
                max_wait=config.max_wait_seconds,
            )
        if isinstance(call, op.Time):
            return service.now()
        answer = await service.calls.run(caller, call)
        # The kit compares tokens. Any other client has no use for those of others: a token is enough to end its job.
        if isinstance(call, (op.Get, op.ListJobs)) and not config.trust_client_time:
            jobs = answer.jobs if isinstance(call, op.ListJobs) else answer
            for job in filter(None, jobs):
                job.token = None
        return answer

    def _still_holds(self, call: op.Operation[Any], answer: Any) -> bool:
        """Return False if the leases of an earlier reserve have expired: a new reserve handles them."""
        if not isinstance(call, op.Reserve):
            return True
        return all(job.expires_at_us is not None and job.expires_at_us > call.now for job in answer)

    async def _without_unwanted(
        self, name: RequestName, call: op.Reserve, jobs: list[JobRecord]
    ) -> list[JobRecord]:
        """The client did not get these jobs. Jobs that it no longer wants go back unspent."""
        wanted = [job for job in jobs if call.types is None or job.type in call.types][: call.limit]
        if len(wanted) < len(jobs):
            kept = {job.id for job in wanted}
            unwanted = [Release(job.id, job.token or "") for job in jobs if job.id not in kept]
            self.replays.replace(name, wanted)
            await self._service.driver.settle(unwanted, now=call.now)
        return wanted

    # -- checks ---------------------------------------------------------------------------------------------

    def _check(self, call: op.Operation[Any]) -> None:
        """Refuse wrong clocks, and batches and pages beyond the broker's own limits."""
        most = self._config.max_batch
        batch = "names" if isinstance(call, op.PublishBlobs) else call.batch
        length = 0 if batch is None else len(getattr(call, batch))
        if length > most:
            raise InvalidRequest(f"{length} in one call: at most {most}; make several calls of it")
        if isinstance(call, (op.Reserve, op.ListJobs, op.ReadAttempts, op.ReadLog)):
            call.limit = min(call.limit, most)
        if isinstance(call, op.Get) and len(set(call.job_ids)) < len(call.job_ids):
            detail = "job_ids: a job is named twice; ask for each once, or the answer may have any size"
            raise InvalidRequest(detail)
        if isinstance(call, op.Enqueue):
            # If the client's word were trusted, a store might keep a second job under the id of another producer's job.
            call.new_ids = False
        if isinstance(call, op.Reserve):
            check_worker(call.worker)
        if hasattr(call, "now") and not self._config.trust_client_time:
            self._set_now(call)

    def _set_now(self, call: Any) -> None:
        """Refuse a wrong clock, and give a call the broker's time. A client's time decides nothing else."""
        now = self._service.now()
        skew = call.now - now
        # A client that sends a million jobs gives the last of them the time of the first, which does no harm. Nor does a reader.
        may_be_late = isinstance(call, op.Enqueue) and skew < 0
        if (
            (call.changes or isinstance(call, op.Wait))
            and abs(skew) > self._config.max_skew_us
            and not may_be_late
        ):
            detail = f"the call says it is {abs(skew) / SECOND:.1f} s {'later' if skew > 0 else 'earlier'} than it is here"
            raise Problem("clock_skew", detail)
        if isinstance(call, op.Enqueue) and skew > 0:
            # Jobs that are due by their producer's clock are ready at once.
            for record in call.records:
                if now < record.run_at_us <= call.now:
                    record.run_at_us = now
        call.now = now
