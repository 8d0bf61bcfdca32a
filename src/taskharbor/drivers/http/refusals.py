"""What a broker's refusals mean: ask another one, ask again later, or tell the caller what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from taskharbor.drivers.http.options import TOKEN
from taskharbor.drivers.http.protocol import LEADER
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch, TaskHarborError

LONGEST_PAUSE = 5.0


class ProblemDocument(msgspec.Struct):
    """The body of a refusal, as far as it matters here."""

    code: str = ""
    detail: str = ""
    hint: str = ""


class Elsewhere(Exception):
    """This broker cannot answer, but another may."""

    def __init__(self, reason: str, leader: str | None = None, *, is_leaderless: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.leader = leader
        """The one that can, where it is known."""
        self.is_leaderless = is_leaderless
        """As far as this one knows, none can at the moment."""


class Later(Exception):
    """This broker will answer, after a pause."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.seconds = seconds


_read = msgspec.json.Decoder(ProblemDocument).decode


def refusal(base: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """`Elsewhere`, `Later`, or what the caller is to be told."""
    problem = _problem(body)
    said = f"{problem.detail} ({problem.hint})" if problem.hint and problem.detail else problem.detail
    said = said or f"status {status}"
    if status == 421:
        if problem.code == "not_leader":
            leader = headers.get(LEADER)
            return Elsewhere(said, leader, is_leaderless=leader is None)
        return InvalidRequest(f"the broker {base} refuses the call: {said}")
    if status == 429:
        return Later(f"the broker {base} refuses the call: {said}", _pause(headers))
    if status == 401:
        return InvalidRequest(
            f"the broker {base} refuses the token, or wants one: put it into the URL (https://token@host) or into {TOKEN}"
        )
    if status == 403:
        return InvalidRequest(f"the broker {base} forbids the call: {said}")
    if status == 404 and problem.code in ("", "no_such_path"):
        return InvalidRequest(
            f"{base} is no broker, or one of another version: start `taskharbor broker` there, of the version that is used here"
        )
    if problem.code == "schema_mismatch":
        return SchemaMismatch(f"the broker {base}: {said}")
    if status in (400, 408, 409, 413, 415, 422):
        # What a driver says of bad input is told as it was said.
        return InvalidRequest(
            problem.detail if problem.code == "invalid_request" else f"broker {base}: {said}"
        )
    if status >= 500:
        return Elsewhere(f"{base}: {said}")
    return TaskHarborError(f"the broker {base} gave an answer that nobody understands: {said}")


def _problem(body: bytes) -> ProblemDocument:
    try:
        return _read(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ProblemDocument()


def _pause(headers: Mapping[str, str]) -> float:
    try:
        return min(max(float(headers.get("Retry-After", "1")), 0.05), LONGEST_PAUSE)
    except ValueError:
        return 1.0


def unavailable(place: str, reasons: list[str]) -> BackendUnavailable:
    told = "; ".join(dict.fromkeys(reasons)) or "no answer"
    return BackendUnavailable(f"no broker answers at {place}: {told}")
