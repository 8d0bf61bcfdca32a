-- Two jobs of one tick, or two lives of one job: a tick has one job, which lives once.
-- :tick_id  the form of the ids of the jobs of ticks
WITH ticks AS (
    SELECT source, job_id, created_at, min(queue) AS queue, max(fence) AS fence,
        regexp_extract(job_id, :tick_id, 2) AS schedule, regexp_extract(job_id, :tick_id, 3) AS generation,
        try_cast(regexp_extract(job_id, :tick_id, 4) AS TIMESTAMP) AS nominal
    FROM {attempts} WHERE job_id LIKE 'tick:%' GROUP BY source, job_id, created_at
), schedules AS (
    SELECT source, key AS schedule, right(job_id, 12) AS generation, min(seq) AS first, max(seq) AS last
    FROM {attempts} WHERE queue = 'taskharbor.schedules' AND reserved_at IS NOT NULL GROUP BY ALL
), known AS (
    SELECT * FROM ticks LEFT JOIN schedules USING (source, schedule, generation)
)
SELECT one.*, struct(other.*) AS other,
    -- A schedule that was deleted and put again may make the tick of that very instant once more. The log has all rows of the one
    -- before the first row of the other, unless both were there at once.
    one.generation = other.generation OR one.first < other.last AND other.first < one.last AS tick_doubled
FROM known AS one JOIN known AS other ON one.source = other.source AND one.schedule = other.schedule
    AND one.nominal = other.nominal AND (one.created_at, one.job_id) > (other.created_at, other.job_id)
