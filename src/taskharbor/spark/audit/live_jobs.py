"""The log against the store: what had not ended must still be there, and nothing may have gone backwards."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from taskharbor.jobs import TERMINAL_STATES, JobState
from taskharbor.spark.audit.kinds import Kind
from taskharbor.spark.audit.violations import Rule, broken


def check_live_jobs(attempts: DataFrame, live_jobs: DataFrame) -> DataFrame:
    """`live_jobs`: source, id, state, fence and created_at of what the store holds, read after the attempts."""
    row = F.struct("queue", "fence", "state", "ended_at", "created_at")
    last = (
        attempts.groupBy("job_id", "source")
        .agg(F.max_by(row, F.col("seq")).alias("last"))
        .select("source", "job_id", "last.*")
    )
    live = live_jobs.select(
        "source",
        F.col("id").alias("job_id"),
        F.struct("state", "fence", "created_at").alias("live"),
    )
    return broken(
        last.join(live, ["source", "job_id"], "left"),
        [
            Rule(
                Kind.LOST_JOB,
                F.col("live").isNull() & ~has_ended(),
                F.col("ended_at"),
                "job {job_id} was {state} after lease {fence} ended at {ended_at}, and the store does not have it",
            ),
            Rule(
                Kind.STORE_CONTRADICTS_LOG,
                _is_same_life() & ((F.col("live.fence") < F.col("fence")) | _left_its_end()),
                F.col("ended_at"),
                "job {job_id} was {state} with fence {fence} at {ended_at}, and the store has it as {live.state} with "
                "fence {live.fence}",
                other_fence=F.col("live.fence"),
            ),
        ],
    )


def has_ended() -> Column:
    return F.col("state").isin(*map(str, sorted(TERMINAL_STATES)))


def _is_same_life() -> Column:
    return F.col("live.created_at") == F.col("created_at")


def _left_its_end() -> Column:
    """Only `dead` can be left, by a requeue that the log as it was read may not have had yet."""
    final = (str(JobState.DONE), str(JobState.CANCELLED))
    return F.col("state").isin(*final) & (F.col("live.state") != F.col("state"))
