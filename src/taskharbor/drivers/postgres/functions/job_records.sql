-- All jobs for readers, from all tables.
CREATE OR REPLACE VIEW job_records AS
SELECT q.name AS queue, j.*
FROM (SELECT *, false AS has_ended FROM jobs UNION ALL SELECT *, true FROM ended) AS j JOIN queues AS q ON q.id = j.queue_id;
