"""Telling a failure queue of jobs that died.

The step that makes a job dead writes down what is to be told, under the id it will have. The failure queue may live on
another server of a cluster, so that is told in a second step: by whoever made the job dead, or, if it died itself, by the next
one who moves jobs of that queue. The id makes it once.
"""

from __future__ import annotations

import msgspec

from taskharbor.drivers.contract import failure_record
from taskharbor.drivers.redis.enqueue import enqueue
from taskharbor.drivers.redis.records import record_from
from taskharbor.drivers.redis.store import Store
from taskharbor.jobs import JobRecord, Micros

_PORTION = 100


class Notice(msgspec.Struct, array_like=True):
    """What stands in front of the dead job in the outbox."""

    id: str
    job_id: str
    queue: str
    now: Micros


_decode_notice = msgspec.msgpack.Decoder(Notice).decode


async def deliver(store: Store, queue: str) -> None:
    """Tell what waits in the queue's outbox."""
    outbox = store.keys(queue)["outbox"]
    while entries := await store.client.command("LRANGE", outbox, 0, _PORTION - 1):
        notices = [_notice(entry, queue) for entry in entries]
        for now, records in _by_time(notices).items():
            await enqueue(store, records, now, new_ids=False)
        await store.client.commands([("LREM", outbox, 1, entry) for entry in entries])


def _notice(entry: bytes, queue: str) -> tuple[Micros, JobRecord]:
    end = 4 + int.from_bytes(entry[:4])
    notice = _decode_notice(entry[4:end])
    dead = record_from(notice.job_id, queue, entry[end:], notice.now)
    return notice.now, failure_record(dead, job_id=notice.id, queue=notice.queue, now=notice.now)


def _by_time(notices: list[tuple[Micros, JobRecord]]) -> dict[Micros, list[JobRecord]]:
    told: dict[Micros, list[JobRecord]] = {}
    for now, record in notices:
        told.setdefault(now, []).append(record)
    return told
