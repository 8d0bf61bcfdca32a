"""A small attempt log made up at random: retries, expiries, cancellations, merges, requeues, over a few days."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from taskharbor.spark.lake.objectives import Objective

OBJECTIVES = (
    Objective(name="soon", kind="wait", queue="mail", threshold_ms=30_000),
    Objective(name="well", kind="success", target=0.9),
)
START = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
_ERRORS = ("job {n} not found", "timeout after {n} ms at 10.0.0.{n}", "bad value 'x{n}'")


def row(seq: int, **values: Any) -> dict[str, Any]:
    """One attempt that was done within its lease; whatever is named is another."""
    created = values.get("created_at", START)
    return {
        "seq": seq,
        "job_id": f"job-{seq}",
        "queue": "default",
        "type": "send",
        "key": None,
        "priority": 0,
        "fence": 1,
        "worker": "w1",
        "created_at": created,
        "run_at": created,
        "reserved_at": created + timedelta(seconds=1),
        "lease_expires_at": created + timedelta(seconds=31),
        "ended_at": created + timedelta(seconds=3),
        "outcome": "done",
        "state": "done",
        "error_type": None,
        "error_message": None,
        "payload_size": 10,
        **values,
    }


def history(jobs: int, seed: int, *, days: float = 2.5) -> list[dict[str, Any]]:
    """The log in the order of its rows: each job's attempts follow one another, those of different jobs are mixed."""
    rng = random.Random(seed)
    rows = [attempt for n in range(jobs) for attempt in _life(rng, n, days)]
    rows.sort(key=lambda one: (one["ended_at"], one["fence"]))
    for seq, one in enumerate(rows, 1):
        one["seq"] = seq
    return rows


def _life(rng: random.Random, n: int, days: float) -> list[dict[str, Any]]:
    created = START + timedelta(seconds=rng.random() * days * 86400)
    about = {
        "job_id": f"job-{n:06d}",
        "queue": rng.choice(["default", "mail", "video"]),
        "type": rng.choice(["send", "resize"]),
        "key": rng.choice([None, f"key-{n % 7}"]),
        "priority": rng.choice([0, 5]),
        "created_at": created,
    }
    waited = created + timedelta(seconds=rng.expovariate(1 / 40))
    if rng.random() < 0.06:
        outcome = rng.choice(["cancelled", "merged"])
        none = {"reserved_at": None, "lease_expires_at": None, "worker": None, "fence": 0}
        return [row(0, **about, **none, run_at=created, ended_at=waited, outcome=outcome, state="cancelled")]
    rows: list[dict[str, Any]] = []
    due, fence = created, 0
    while True:
        fence += 1
        reserved = due + timedelta(seconds=rng.expovariate(1 / 40))
        expires = reserved + timedelta(seconds=120)
        ended = reserved + timedelta(seconds=rng.expovariate(1 / (4000 if rng.random() < 0.01 else 30)))
        outcome, state, error = "done", "done", None
        chance = rng.random()
        if ended > expires:
            outcome, state, ended = "expired", "ready", expires + timedelta(seconds=rng.random() * 400)
        elif chance < 0.2:
            outcome, state, error = "retried", "scheduled", rng.choice(_ERRORS).format(n=n)
        elif chance < 0.25:
            outcome, state, error = "dead", "dead", rng.choice(_ERRORS).format(n=n)
        elif chance < 0.3:
            outcome, state = "released", "ready"
        lease = {
            "fence": fence,
            "worker": f"w{rng.randrange(4)}",
            "reserved_at": reserved,
            "lease_expires_at": max(expires, ended) if outcome != "expired" else expires,
        }
        fault = {"error_type": error and "ValueError", "error_message": error}
        rows.append(
            row(0, **about, **lease, **fault, run_at=due, ended_at=ended, outcome=outcome, state=state)
        )
        if state == "dead" and rng.random() < 0.5:
            due = ended + timedelta(hours=rng.random() * 10)
            none = {"reserved_at": None, "lease_expires_at": None, "worker": None, "fence": fence}
            rows.append(row(0, **about, **none, run_at=due, ended_at=due, outcome="requeued", state="ready"))
        elif state in ("done", "dead"):
            return rows
        else:
            due = ended + timedelta(seconds=rng.random() * 20)
