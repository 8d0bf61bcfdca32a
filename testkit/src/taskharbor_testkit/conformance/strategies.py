"""Values for the state machine: few names, so that histories collide in ids, keys, tokens and instants."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from taskharbor.drivers.contract import JobFilter, QueueSettings, SettingsField
from taskharbor.jobs import SECOND, JobState, UpdateFlags, UpdateRunAt

TYPES = ("mail", "sms", "push")

queues = st.sampled_from(("q",) * 6 + ("r", "failed"))
pick = st.sampled_from((0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 8, 13, 21))
"""Chooses among what exists by then, newest first: 0 is the latest."""
delays = st.sampled_from((0, 0, 0, 0, -SECOND, SECOND, 3 * SECOND))
leases = st.sampled_from((SECOND, 3 * SECOND, 10 * SECOND))
workers = st.sampled_from(("w1", "w2", "w3"))
clients = st.integers(0, 2)
types = st.sampled_from((None, None, None, None, [], ["mail"], ["sms", "mail"], ["push", "sms", "nobody"]))
limits = st.sampled_from((1, 2, 3, 10, 0))
page_sizes = st.sampled_from((1, 2, 3, 10))
time_steps = st.sampled_from((1, SECOND - 1, SECOND, 2 * SECOND, 3 * SECOND, 10 * SECOND))
lags = st.sampled_from((0,) * 8 + (1, 3, SECOND // 2, SECOND))
"""The time between a caller's reading of the clock and the effect of its call."""

flags = st.none() | st.builds(
    UpdateFlags, st.booleans(), st.sampled_from(get_args(UpdateRunAt)), *[st.booleans()] * 3
)

wishes = st.fixed_dictionaries(
    {
        "id": st.integers(0, 79).map("j{}".format),
        "queue": queues,
        "type": st.sampled_from(TYPES),
        "payload": st.sampled_from((b"", b"1", b"longer")),
        "priority": st.sampled_from((0, 0, 0, 1, -1)),
        "delay": delays,
        "key": st.sampled_from((None, None, None, "k", "k", "l")),
        "update": flags,
        "idempotency_key": st.sampled_from((None,) * 12 + ("g", "h", "i")),
        "max_attempts": st.sampled_from((5, 3, 2, 1)),
        "max_stalls": st.sampled_from((0, 0, 2, 1)),
        "timeout_us": st.sampled_from((0, SECOND)),
        "headers": st.sampled_from(({}, {"trace": "1"})),
        "attempts": st.sampled_from((0, 0, 0, 2)),
    }
)
"""One enqueued record, with a delay instead of an instant."""

verbs = st.sampled_from(("ack", "ack", "retry", "fail", "release", "snooze", "discard"))

reservations = st.fixed_dictionaries(
    {"queue": queues, "limit": limits, "lease": leases, "worker": workers, "types": types, "lag": lags}
)
"""The arguments of a reserve."""

picks = st.lists(pick, min_size=1, max_size=3)
keys = st.lists(st.sampled_from(("k", "k", "l", "unknown")), min_size=1, max_size=2)

ends = st.fixed_dictionaries(
    {
        "ends": st.lists(st.tuples(pick, verbs, delays), min_size=1, max_size=3),
        "which": pick,
        "lease": leases,
        "lag": lags,
    }
)
"""The ends and extensions of leases: the leases, the settlement, the delay."""

settings = st.builds(
    QueueSettings,
    paused=st.sampled_from((False,) * 7 + (True,)),
    max_inflight=st.sampled_from((None, None, 1, 2, 3)),
    failure_queue=st.sampled_from((None, "failed")),
    keep_done_us=st.sampled_from((None, SECOND, 5 * SECOND)),
    keep_dead_us=st.sampled_from((None, SECOND, 5 * SECOND)),
    keep_attempts_us=st.sampled_from((None, SECOND, 5 * SECOND)),
)

fields = st.none() | st.lists(st.sampled_from(get_args(SettingsField)), max_size=3)
declarations = st.sampled_from((None, None, "a", "b"))

filters = st.builds(
    JobFilter,
    queue=st.none() | queues,
    states=st.none() | st.frozensets(st.sampled_from(tuple(JobState)), max_size=3),
    types=st.none() | st.frozensets(st.sampled_from(TYPES), max_size=2),
    key=st.sampled_from((None, None, "k")),
    worker=st.sampled_from((None, None, "w1")),
)
