"""The race on Redis: who takes part, on a server that is emptied before each, and what is counted to see what is left.

The append-only file is written as Redis recommends (everysec) for everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import redis

from benchmarks.peers.contender import OURS, RAW, Contender
from benchmarks.peers.installed import CannotInstall
from benchmarks.peers.track import Ask
from benchmarks.redis_server import fresh_redis, server, settle_down
from taskharbor_testkit.servers.discovery import version_numbers

CONTENDERS = (
    Contender(
        name=RAW,
        program="raw_redis",
        settings="batches of 500, two scripts each",
        jobs=100_000,
        unfinished="LLEN q\nZCARD lease",
    ),
    Contender(
        name=OURS,
        program="ours",
        settings="defaults",
        jobs=100_000,
        unfinished="ZCARD {default}:waiting\nZCARD {default}:active",
    ),
    Contender(
        name="BullMQ",
        program="bullmq",
        settings="concurrency 100, ended jobs removed",
        jobs=20_000,
        unfinished="LLEN bull:bench:wait\nLLEN bull:bench:active",
        node=("bullmq@6.7.0", "ioredis@5.11.1"),
    ),
    Contender(
        name="ChasquiMQ",
        program="chasquimq",
        settings="concurrency 100",
        jobs=20_000,
        unfinished="XLEN {chasqui:bench}:stream",
        python=("chasquimq==1.3.0", "uvloop==0.23.0"),
        # It adds jobs with ids that the server checks for doubles, and acknowledges by XACKDEL.
        server="8.6",
    ),
    Contender(
        name="taskiq",
        program="taskiq",
        settings="stream broker, 100 at once",
        jobs=5_000,
        unfinished="XINFO GROUPS bench",
        python=("taskiq==0.13.0", "taskiq-redis==1.2.4", "hiredis==3.5.0", "uvloop==0.23.0"),
    ),
    Contender(
        name="huey",
        program="huey",
        settings="4 threads, no results; a crash loses what was taken",
        jobs=10_000,
        unfinished="LLEN huey.redis.bench",
        python=("huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0"),
    ),
    Contender(
        name="dramatiq",
        program="dramatiq",
        settings="8 threads",
        jobs=5_000,
        unfinished="HLEN dramatiq:default.msgs",
        python=("dramatiq[redis]==2.2.1", "hiredis==3.5.0"),
    ),
    Contender(
        name="saq",
        program="saq",
        settings="concurrency 50, no results",
        jobs=5_000,
        unfinished="ZCARD saq:bench:incomplete",
        python=("saq[hiredis]==0.26.4", "typing_extensions", "uvloop==0.23.0"),
    ),
    Contender(
        name="arq",
        program="arq",
        settings="100 at once, polling every 10 ms, no results",
        jobs=3_000,
        unfinished="ZCARD arq:queue",
        python=("arq==0.28.0", "hiredis==3.5.0", "uvloop==0.23.0"),
    ),
    Contender(
        name="streaq",
        program="streaq",
        settings="concurrency 256, no results",
        jobs=5_000,
        unfinished="XLEN streaq:default:queues:normal",
        python=("streaq==7.2.0", "hiredis==3.5.0", "uvloop==0.23.0"),
    ),
    Contender(
        name="Celery",
        program="celery",
        settings="late acknowledgement, prefetch 64, results ignored",
        jobs=3_000,
        unfinished="LLEN celery\nHLEN unacked",
        python=("celery[redis]==5.7.0", "hiredis==3.5.0"),
    ),
    Contender(
        name="RQ",
        program="rq",
        settings="simple worker (does not fork), no results",
        jobs=1_000,
        unfinished="LLEN rq:queue:bench\nZCARD rq:wip:bench",
        python=("rq==2.12.0", "hiredis==3.5.0"),
    ),
)


class RedisTrack:
    contenders = CONTENDERS
    failures = (redis.RedisError,)

    def admit(self, contender: Contender) -> None:
        if contender.server and version_numbers(server().version) < version_numbers(contender.server):
            raise CannotInstall(f"needs Redis {contender.server} or newer, and this is {server().version}")

    def fresh(self) -> AbstractContextManager[str]:
        return fresh_redis()

    def settle_down(self) -> None:
        settle_down()

    @contextmanager
    def asking(self, url: str) -> Iterator[Ask]:
        with redis.Redis.from_url(url, single_connection_client=True, decode_responses=True) as client:

            def ask(contender: Contender, count: int) -> int:
                return sum(
                    _number(client.execute_command(*line.split()))
                    for line in contender.unfinished.splitlines()
                )

            yield ask


def _number(answer: Any) -> int:
    """Of a stream's groups: what they have not read, and what they have not acknowledged."""
    if isinstance(answer, int):
        return answer
    return sum(int(group["pending"]) + int(group.get("lag") or 0) for group in answer)
