"""What a driver asks of a broker, and what that answers: one operation per method of the contract.

`POST /v1/driver/<operation>` with one of these calls as msgpack (or JSON, where `Content-Type` says so); the answer comes in
the same form. Instants are microseconds, as in the contract. Lists are told as the contract's own structs, so that a batch is
written and read in one go: what would need a word per job (errors, kinds of settlements) is told apart from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec

from taskharbor.drivers.contract import (
    AttemptPage,
    Capabilities,
    Enqueued,
    Extension,
    JobFilter,
    Page,
    QueueSettings,
    QueueStats,
)
from taskharbor.drivers.http.item_errors import ItemError
from taskharbor.drivers.http.settlements import Settlements
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Attempt, JobRecord, JobState, Lease, Micros

VERSION = 1
"""Raised when one side would misunderstand the other."""

PATH = "/v1/driver/"
MSGPACK = "application/msgpack"

REQUEST_ID = "TaskHarbor-Request"
"""Header: a name that nobody else gives to a call. Who asks again under the same name gets the same answer."""
HEARD = "TaskHarbor-Heard"
"""Header: names of earlier calls whose answers have arrived, with a blank between them. Nobody will ask for those again."""
LEADER = "TaskHarbor-Leader"
"""Header of a refusal: the address of the broker that would not have refused."""

C = TypeVar("C")
A = TypeVar("A")


# Checked where a call is read, so that no number overflows in a store.
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Duration: TypeAlias = Annotated[Micros, msgspec.Meta(ge=0, le=2**52)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


# -- calls --------------------------------------------------------------------------------------------------


class NoArguments(msgspec.Struct):
    """hello, time"""


class EnqueueCall(msgspec.Struct):
    records: list[JobRecord]
    now: Micros
    new_ids: bool = False


class ReserveCall(msgspec.Struct):
    queue: str
    limit: Limit
    lease_for: Duration
    now: Micros
    worker: str
    types: list[str] | None = None


class ExtendCall(msgspec.Struct):
    extensions: list[Extension]
    lease_for: Duration
    now: Micros


class SettleCall(msgspec.Struct):
    settlements: Settlements
    now: Micros


class ReclaimCall(msgspec.Struct):
    now: Micros
    queue: str | None = None
    limit: Limit = 1000


class JobsCall(msgspec.Struct):
    """cancel, requeue, get"""

    job_ids: list[str]
    now: Micros


class PurgeCall(msgspec.Struct):
    selection: JobFilter
    limit: Limit = 1000


class PruneCall(msgspec.Struct):
    now: Micros
    limit: Limit = 1000


class ListCall(msgspec.Struct):
    selection: JobFilter
    now: Micros
    limit: Limit = 100
    cursor: str | None = None


class StatsCall(msgspec.Struct):
    now: Micros
    queue: str | None = None


class ConfigureCall(msgspec.Struct):
    queue: str
    settings: QueueSettings
    now: Micros


class SettingsCall(msgspec.Struct):
    queue: str


class ReadAttemptsCall(msgspec.Struct):
    after: str | None = None
    limit: Limit = 1000


class JobAttemptsCall(msgspec.Struct):
    job_id: str


class WaitCall(msgspec.Struct):
    queues: list[str]
    now: Micros
    timeout: Seconds
    seen: str | None = None
    """What the last wait of this client for these queues was told."""


# -- answers ------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, kw_only=True):
    """What a client must know of the broker and of the store behind it."""

    version: int
    capabilities: Capabilities
    max_batch: int
    """Jobs in one call, or on one page."""
    max_body: int
    """Bytes in one call."""
    max_wait: float
    """Seconds after which the broker ends a wait in any case."""


class Existing(msgspec.Struct):
    """Of an enqueue: the jobs that were there already, by place. All others are stored under the ids they came with."""

    ids: dict[int, str] = {}

    @classmethod
    def of(cls, accepted: Sequence[Enqueued]) -> Existing:
        return cls({n: one.id for n, one in enumerate(accepted) if one.existed})

    def accepted(self, records: Sequence[JobRecord]) -> list[Enqueued]:
        if not self.ids:
            return [Enqueued(record.id) for record in records]
        known = self.ids
        return [
            Enqueued(known[n], True) if n in known else Enqueued(record.id)
            for n, record in enumerate(records)
        ]


class Refused(msgspec.Struct):
    """Of a settle: the errors by place. All others were written."""

    errors: dict[int, ItemError] = {}


class Leases(msgspec.Struct):
    leases: list[Lease | None]
    errors: dict[int, ItemError] = {}


class States(msgspec.Struct):
    """Of cancel and requeue: what became of each job."""

    states: list[JobState | None]
    errors: dict[int, ItemError] = {}


class Woken(msgspec.Struct):
    woken: bool
    seen: str
    """For the next wait for the same queues."""


# -- operations ---------------------------------------------------------------------------------------------


class Operation(Generic[C, A]):
    """A method of the contract on the wire. Encoders and decoders are made once."""

    def __init__(self, name: str, call: type[C], answer: type[A], *, is_change: bool = False) -> None:
        self.name = name
        self.is_change = is_change
        """Whether it matters that a repeated try is recognised as such."""
        self.read_call = msgspec.msgpack.Decoder(call).decode
        self.read_call_json = msgspec.json.Decoder(call).decode
        self.read_answer = msgspec.msgpack.Decoder(answer).decode


encode = msgspec.msgpack.Encoder().encode
encode_json = msgspec.json.Encoder().encode


def encode_call(call: object) -> bytes:
    """For a client, who is told what cannot be said."""
    try:
        return encode(call)
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a text cannot be written as UTF-8 ({error.reason}): {error.object!r}"
        ) from None
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"something in the call cannot be told to a broker: {error}") from None


HELLO = Operation("hello", NoArguments, Hello)
TIME = Operation("time", NoArguments, int)
ENQUEUE = Operation("enqueue", EnqueueCall, Existing, is_change=True)
RESERVE = Operation("reserve", ReserveCall, list[JobRecord], is_change=True)
EXTEND_LEASE = Operation("extend_lease", ExtendCall, Leases, is_change=True)
SETTLE = Operation("settle", SettleCall, Refused, is_change=True)
RECLAIM = Operation("reclaim", ReclaimCall, int, is_change=True)
CANCEL = Operation("cancel", JobsCall, States, is_change=True)
REQUEUE = Operation("requeue", JobsCall, States, is_change=True)
PURGE = Operation("purge", PurgeCall, int, is_change=True)
PRUNE = Operation("prune", PruneCall, int, is_change=True)
GET = Operation("get", JobsCall, list[JobRecord | None])
LIST_JOBS = Operation("list_jobs", ListCall, Page)
STATS = Operation("stats", StatsCall, list[QueueStats])
CONFIGURE = Operation("configure", ConfigureCall, type(None), is_change=True)
SETTINGS = Operation("settings", SettingsCall, QueueSettings)
READ_ATTEMPTS = Operation("read_attempts", ReadAttemptsCall, AttemptPage)
JOB_ATTEMPTS = Operation("job_attempts", JobAttemptsCall, list[Attempt])
WAIT = Operation("wait", WaitCall, Woken)
