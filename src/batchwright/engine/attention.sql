-- What needs a person's attention. Each query examines a bounded number of rows.

-- The oldest due job of each queue and priority, if it has waited for a while: as long as it does not start, the jobs
-- behind it do not start either.
-- name: late_heads
WITH RECURSIVE head AS (
    (SELECT job.id, job.queue, job.priority, job.run_after FROM batchwright.job AS job
     WHERE job.status = 'QUEUED'
     ORDER BY job.queue, job.priority, job.run_after, job.id
     LIMIT 1)
    UNION ALL
    SELECT next.id, next.queue, next.priority, next.run_after
    FROM head
    CROSS JOIN LATERAL (
        SELECT job.id, job.queue, job.priority, job.run_after FROM batchwright.job AS job
        WHERE job.status = 'QUEUED' AND (job.queue, job.priority) > (head.queue, head.priority)
        ORDER BY job.queue, job.priority, job.run_after, job.id
        LIMIT 1
    ) AS next
)
SELECT id, extract(epoch FROM :now - run_after)::float8
FROM head
WHERE run_after < :now - make_interval(secs => %(late_seconds)s)
ORDER BY run_after
LIMIT %(limit)s

-- Jobs of a worker whose lease expired some time ago, and that no worker has rescued.
-- name: abandoned
SELECT id, job_type, locked_by, extract(epoch FROM :now - lease_until)::float8
FROM batchwright.job
WHERE locked_by IS NOT NULL AND status = 'RUNNING' AND lease_until < :now - make_interval(secs => %(late_seconds)s)
    AND tenant = coalesce(%(tenant)s, tenant)
ORDER BY lease_until
LIMIT %(limit)s

-- name: troubled_workers
SELECT id, broken, extract(epoch FROM :now - heartbeat_at)::float8
FROM batchwright.worker
WHERE left_at IS NULL
    AND (broken IS NOT NULL OR heartbeat_at < :now - make_interval(secs => %(silent_seconds)s))
ORDER BY heartbeat_at
LIMIT %(limit)s

-- Parked jobs by type. This steps along the index of the inbox, from each tenant and type to the next, and does not
-- read all the other failed jobs.
-- name: poisoned
WITH RECURSIVE kind AS (
    (SELECT first.tenant, first.job_type
     FROM (
        SELECT job.tenant, job.job_type FROM batchwright.job AS job
        WHERE job.status = 'FAILED' AND job.dismissed_at IS NULL
            AND (job.tenant, job.job_type) >= (coalesce(%(tenant)s::text, ''), '')
        ORDER BY job.tenant, job.job_type
        LIMIT 1
     ) AS first
     WHERE first.tenant = coalesce(%(tenant)s::text, first.tenant))
    UNION ALL
    SELECT next.tenant, next.job_type
    FROM kind
    CROSS JOIN LATERAL (
        SELECT job.tenant, job.job_type FROM batchwright.job AS job
        WHERE job.status = 'FAILED' AND job.dismissed_at IS NULL
            AND (job.tenant, job.job_type) > (kind.tenant, kind.job_type)
        ORDER BY job.tenant, job.job_type
        LIMIT 1
    ) AS next
    WHERE next.tenant = coalesce(%(tenant)s::text, next.tenant)
)
SELECT kind.job_type, sum(parked.n)::bigint
FROM (SELECT tenant, job_type FROM kind LIMIT %(kinds_max)s) AS kind
CROSS JOIN LATERAL (
    SELECT count(*) AS n
    FROM (
        SELECT FROM batchwright.job AS job
        WHERE job.status = 'FAILED' AND job.dismissed_at IS NULL AND job.tenant = kind.tenant
            AND job.job_type = kind.job_type AND coalesce(job.error ->> 'code', '') = 'poison'
        LIMIT %(count_max)s
    ) AS bounded
) AS parked
WHERE parked.n > 0
GROUP BY kind.job_type
ORDER BY kind.job_type
LIMIT %(limit)s
