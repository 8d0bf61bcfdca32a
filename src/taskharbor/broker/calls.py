"""The driver protocol, server side: every operation of the contract as `POST /v1/driver/<operation>`.

A call is exactly the contract's, `now` included, and so is what it does: this only reads, checks, runs and writes. See
`taskharbor.drivers.operations` for the calls, and `taskharbor.drivers.http.protocol` for their form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from taskharbor.broker.exchange import Departure
from taskharbor.broker.gate import CALLER, ServedPath
from taskharbor.broker.problems import Problem, invalid
from taskharbor.broker.replays import Name, Replays, heard_names, request_name
from taskharbor.broker.routes import JSON
from taskharbor.broker.service import Service
from taskharbor.broker.tokens import Caller
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import Page, Release
from taskharbor.drivers.dispatch import check_texts
from taskharbor.drivers.http import protocol as wire
from taskharbor.drivers.records import Greeting
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, JobRecord


def driver_paths(service: Service) -> list[ServedPath]:
    """The paths of the driver protocol."""
    calls = DriverCalls(service)
    return [
        ServedPath("POST", f"{wire.PATH}{name}", partial(calls.answer, operation), operation.scope)
        for name, operation in op.OPERATIONS.items()
    ]


class DriverCalls:
    """Carries out calls of the driver contract for clients."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._driver = service.driver
        self._config = service.config
        self.replays = Replays()

    async def answer(
        self, operation: type[op.Operation[Any]], request: Request, names: dict[str, str] | None = None
    ) -> Response:
        """Answer one call. Raises `Problem` if it is refused."""
        is_json = _is_json(request)
        body = await request.body()
        try:
            call = (wire.READ_CALL_JSON if is_json else wire.READ_CALL)[operation.name](body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = "a client of another version? use the same version of TaskHarbor at both ends"
            raise invalid(f"this is no call of {operation.name}: {error}", hint) from None
        check_texts(call)
        caller: Caller = request.scope[CALLER]
        if isinstance(call, op.Wait):
            # A wait is given up when its client goes away: it would hold a place that others want.
            with Departure(request) as departure:
                return _response(await departure.unless_left(self._run(call)), is_json)
        if not call.changes:
            read = await self._run(call)
            return _response(read if "work" in caller.scopes else _without_tokens(read), is_json)
        self.replays.heard(caller.name, heard_names(request.headers.get(wire.HEARD)))
        given = request.headers.get(wire.REQUEST_ID)
        if given is None:
            return _response(await self._run(call), is_json)
        name = request_name(caller.name, given)
        replay = await self.replays.once(
            name, call.name, lambda: self._run(call), lambda answer: self._still_holds(call, answer)
        )
        answer = replay.answer
        if replay.is_repeated and isinstance(call, op.Reserve):
            answer = await self._without_unwanted(name, call, answer)
        response = _response(answer, is_json)
        self.replays.weigh(name, len(response.body))
        return response

    async def _run(self, call: op.Operation[Any]) -> Any:
        self._check(call)
        service, config = self._service, self._config
        if isinstance(call, op.Hello):
            return Greeting(
                version=wire.VERSION,
                capabilities=self._driver.capabilities,
                max_batch=config.max_batch,
                max_body=config.max_body_bytes,
                max_wait=config.max_wait_seconds,
            )
        if isinstance(call, op.Time):
            return service.now()
        if isinstance(call, op.Wait):
            return await service.long_polls.wait(call)
        return await self._driver.run(call)

    def _still_holds(self, call: op.Operation[Any], answer: Any) -> bool:
        """Return False if the leases of an earlier reserve have expired: a new reserve handles them."""
        if not isinstance(call, op.Reserve):
            return True
        self._check_now(call)
        return all(job.expires_at_us is not None and job.expires_at_us > call.now for job in answer)

    async def _without_unwanted(self, name: Name, call: op.Reserve, jobs: list[JobRecord]) -> list[JobRecord]:
        """The client did not get these jobs. Jobs that it no longer wants go back unspent."""
        wanted = [job for job in jobs if call.types is None or job.type in call.types][: call.limit]
        if len(wanted) < len(jobs):
            kept = {job.id for job in wanted}
            unwanted = [Release(job.id, job.token or "") for job in jobs if job.id not in kept]
            self.replays.replace(name, wanted)
            await self._driver.settle(unwanted, now=call.now)
        return wanted

    # -- checks ---------------------------------------------------------------------------------------------

    def _check(self, call: op.Operation[Any]) -> None:
        """Refuse wrong clocks, and batches and pages beyond the broker's own limits."""
        most = self._config.max_batch
        length = 0 if call.batch is None else len(getattr(call, call.batch))
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
        if hasattr(call, "now") and (call.changes or isinstance(call, op.Wait)):
            self._check_now(call)

    def _check_now(self, call: Any) -> None:
        """Refuse a wrong clock. A client with one could end leases of others, or run jobs early."""
        if self._config.trust_client_time:
            return
        now = self._service.now()
        skew = call.now - now
        # A client that sends a million jobs gives the last of them the time of the first, which does no harm.
        if abs(skew) > self._config.max_skew_us and not (isinstance(call, op.Enqueue) and skew < 0):
            detail = f"the call says it is {abs(skew) / SECOND:.1f} s {'later' if skew > 0 else 'earlier'} than it is here"
            raise Problem("clock_skew", detail)
        if not isinstance(call, (op.Enqueue, op.PublishBlobs)):
            # Jobs that are due by their producer's clock are ready at once. No lease ends early here.
            call.now = min(call.now, now)


def _without_tokens(answer: Any) -> Any:
    """Remove lease tokens. A token is enough to end its job, so only workers see it."""
    if isinstance(answer, Page):
        return replace(answer, jobs=_without_tokens(answer.jobs))
    if not isinstance(answer, list):
        return answer
    return [replace(one, token=None) if isinstance(one, JobRecord) else one for one in answer]


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in (wire.MSGPACK, JSON):
        return kind == JSON
    detail = f"the body must be {wire.MSGPACK} or {JSON}, and Content-Type must say so"
    raise Problem("unsupported_media_type", detail, hint=f"send the header Content-Type: {wire.MSGPACK}")


def _response(answer: Any, is_json: bool) -> Response:
    if is_json:
        return Response(wire.encode_json(answer), media_type=JSON)
    return Response(wire.encode(answer), media_type=wire.MSGPACK)
