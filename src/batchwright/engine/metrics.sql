-- The counts of workers, and the state of the queues; run by metrics.py.

-- name: insert_counts
-- The first write of a row, repeated until it is answered. If it returns no row, the row was folded meanwhile.
INSERT INTO batchwright.worker_counts AS written (worker, counts, updated_at)
VALUES (%(worker)s, %(counts)s::jsonb, :now)
ON CONFLICT (worker) DO UPDATE SET counts = excluded.counts, updated_at = excluded.updated_at
WHERE written.folded_at IS NULL
RETURNING written.worker

-- name: update_counts
UPDATE batchwright.worker_counts SET counts = %(counts)s::jsonb, updated_at = :now
WHERE worker = %(worker)s AND folded_at IS NULL
RETURNING worker

-- name: folded_counts
SELECT counts FROM batchwright.worker_counts WHERE worker = %(worker)s AND folded_at IS NOT NULL

-- name: fold_counts
-- Add rows that were not updated for long to the sum of workers that are gone, and mark them in the same statement.
-- If a worker writes at this moment, either it waits for us and then finds its row folded, or we wait and skip the row.
WITH gone AS (
    UPDATE batchwright.worker_counts SET folded_at = :now
    WHERE worker IN (
        SELECT worker FROM batchwright.worker_counts
        WHERE worker <> '' AND folded_at IS NULL AND updated_at < :now - make_interval(secs => %(silent_seconds)s)
        ORDER BY worker LIMIT %(limit)s
        FOR UPDATE
    )
    RETURNING counts
),
kept AS (
    SELECT counts FROM batchwright.worker_counts WHERE worker = '' FOR UPDATE
),
summed AS (
    SELECT key, sum(value::numeric) AS n
    FROM (SELECT counts FROM gone UNION ALL SELECT counts FROM kept) AS parts, jsonb_each_text(parts.counts)
    GROUP BY key
),
folded AS (
    INSERT INTO batchwright.worker_counts (worker, counts, updated_at)
    SELECT '', coalesce((SELECT jsonb_object_agg(key, n) FROM summed), '{}'), :now
    WHERE EXISTS (SELECT FROM gone)
    ON CONFLICT (worker) DO UPDATE SET counts = excluded.counts, updated_at = excluded.updated_at
)
SELECT count(*) FROM gone

-- name: forget_folded
DELETE FROM batchwright.worker_counts WHERE folded_at < :now - make_interval(secs => %(kept_seconds)s)

-- name: counted
-- Numbers are added as decimals: the sum does not depend on their order, so folding cannot make it smaller.
SELECT key, sum(value::numeric)::double precision
FROM batchwright.worker_counts, jsonb_each_text(counts)
WHERE folded_at IS NULL
GROUP BY key

-- name: write_gauges
UPDATE batchwright.worker SET gauges = %(gauges)s::jsonb WHERE id = %(worker)s RETURNING id

-- name: gauges
SELECT key, sum(value::numeric)::double precision
FROM batchwright.worker, jsonb_each_text(gauges)
WHERE left_at IS NULL AND heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
GROUP BY key

-- name: depths
-- Each queue is counted up to a limit in the index of due jobs; the oldest job of each priority is one index lookup.
WITH clock AS MATERIALIZED (SELECT :now AS now)
SELECT CASE WHEN place <= %(queues_max)s THEN queue.name ELSE 'other' END, bool_or(queue.paused),
       sum(depth.due)::bigint, sum(depth.scheduled)::bigint,
       greatest(0, extract(epoch FROM min(clock.now) - min(oldest.run_after)))::double precision
FROM clock
CROSS JOIN (
    SELECT name, paused_at IS NOT NULL AS paused, row_number() OVER (ORDER BY name) AS place FROM batchwright.queue
) AS queue
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE run_after <= clock.now) AS due, count(*) FILTER (WHERE run_after > clock.now) AS scheduled
    FROM (
        SELECT run_after FROM batchwright.job
        WHERE job.queue = queue.name AND status = 'QUEUED'
        LIMIT %(jobs_max)s
    ) AS bounded
) AS depth
CROSS JOIN LATERAL (
    SELECT min(first.run_after) AS run_after
    FROM generate_series(0, 9) AS lane (priority)
    CROSS JOIN LATERAL (
        SELECT run_after FROM batchwright.job
        WHERE job.queue = queue.name AND job.priority = lane.priority::smallint AND status = 'QUEUED'
        ORDER BY run_after LIMIT 1
    ) AS first
) AS oldest
GROUP BY 1

-- name: taken
-- Jobs that workers hold, and parents that wait for their children: the latter are RUNNING without a lock.
SELECT queue, 'running', count(*) FROM batchwright.job
WHERE locked_by IS NOT NULL AND status = 'RUNNING'
GROUP BY queue
UNION ALL
SELECT queue, 'waiting', count(*)
FROM (
    SELECT queue FROM batchwright.job WHERE locked_by IS NULL AND status = 'RUNNING' LIMIT %(jobs_max)s
) AS bounded
GROUP BY queue

-- name: failed
SELECT job_type, count(*)
FROM (
    SELECT job_type FROM batchwright.job WHERE status = 'FAILED' AND dismissed_at IS NULL LIMIT %(jobs_max)s
) AS bounded
GROUP BY job_type

-- name: slots
SELECT count(*), coalesce(sum(concurrency), 0), coalesce(sum(running), 0) FROM batchwright.worker
WHERE left_at IS NULL AND heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
