-- A database with history: jobs that have ended, their events, a few open jobs, and an old outage.
-- The newest tenth has no failed job at all, so that a search for one along the newest jobs finds nothing there.

SET synchronous_commit = off;
SET maintenance_work_mem = '512MB';

SELECT batchwright.make_event_partitions(now() - interval '7 days');
SELECT batchwright.make_event_partitions(now());
INSERT INTO batchwright.queue (name) SELECT 'queue_' || n FROM generate_series(0, 19) AS n;
ALTER TABLE batchwright.job DISABLE TRIGGER legal_births;

INSERT INTO batchwright.job (
    id, job_type, queue, tenant, status, priority, run_after, payload, result, error, max_attempts, attempts, claims,
    pipeline_id, parent_job_id, round, created_at, started_at, finished_at, dismissed_at, idempotency_key)
SELECT one.id, CASE WHEN n <= 10 THEN 'rare' ELSE 'type_' || n % 10 END, 'queue_' || n % 20,
    CASE WHEN n % 10 = 0 THEN 'tenant_' || n / 10 % 10 ELSE 'default' END, one.status::batchwright.job_status, 5, one.at,
    '{"n": 1, "note": "a payload of some size, as jobs have them"}',
    CASE WHEN one.status = 'SUCCEEDED' THEN '{"ok": true}'::jsonb END,
    CASE WHEN one.status = 'FAILED' THEN jsonb_build_object('kind', 'transient', 'code', 'code_' || n % 5, 'message', 'm') END,
    3, 1, 1, coalesce(one.parent, one.id), one.parent, CASE WHEN one.parent IS NOT NULL THEN 1 END,
    one.at, one.at + interval '1 second', one.at + CASE WHEN n = 1 THEN interval '34 hours' ELSE interval '2 seconds' END,
    CASE WHEN one.status = 'FAILED' AND n % 4 = 0 THEN now() END, CASE WHEN n % 50 = 0 THEN 'key ' || n END
FROM (
    SELECT n, lpad(to_hex(n), 32, '0')::uuid AS id, now() - interval '7 days' * (1 - n / :jobs::float8) AS at,
        CASE WHEN n BETWEEN 2 AND :jobs / 5 THEN lpad('1', 32, '0')::uuid END AS parent,
        CASE WHEN n BETWEEN :jobs / 20 AND :jobs / 10 THEN 'FAILED'
             WHEN n < :jobs * 0.9 AND n % 200 = 7 THEN 'FAILED'
             WHEN n < :jobs * 0.9 AND n % 500 = 9 THEN 'CANCELLED'
             ELSE 'SUCCEEDED' END AS status
    FROM generate_series(1, :jobs) AS n
) AS one;

-- Open jobs, older than all others: queued for later, held by workers, and parents that wait.
INSERT INTO batchwright.job (
    id, job_type, queue, tenant, status, priority, run_after, payload, max_attempts, attempts, claims, pipeline_id,
    created_at, locked_by, locked_at, lease_until, children_open, on_join, waits)
SELECT one.id, 'type_' || n % 10, 'queue_' || n % 20, 'default', one.status::batchwright.job_status, 5,
    now() + interval '1 day', '{}', 3, 1, 1, one.id, now() - interval '8 days',
    CASE WHEN one.is_held THEN 'worker ' || n % 100 END, CASE WHEN one.is_held THEN now() END,
    CASE WHEN one.is_held THEN now() + interval '1 day' END,
    CASE WHEN one.status = 'RUNNING' AND NOT one.is_held THEN 1 ELSE 0 END,
    CASE WHEN one.status = 'RUNNING' AND NOT one.is_held THEN 'close' END, 1
FROM (
    SELECT n, lpad(to_hex(4294967296 + n), 32, '0')::uuid AS id,
        CASE WHEN n <= 2000 THEN 'QUEUED' ELSE 'RUNNING' END AS status, n BETWEEN 2001 AND 3600 AS is_held
    FROM generate_series(1, 4000) AS n
) AS one;

INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, message)
SELECT job.id, job.created_at + turn * interval '100 milliseconds', 'step', NULL, 1, 1, 'worker', 'a message'
FROM batchwright.job CROSS JOIN generate_series(1, :events) AS turn;

ALTER TABLE batchwright.job ENABLE TRIGGER legal_births;
