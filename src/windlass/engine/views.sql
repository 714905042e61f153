-- What people look at: lists, reasons for waiting, the inbox, pipelines and queues. Nothing here changes a job.

-- part: matches
(cardinality(%(statuses)s::text[]) = 0 OR job.status::text = ANY(%(statuses)s::text[]))
    AND (%(job_type)s::text IS NULL OR job.job_type = %(job_type)s)
    AND (%(queue)s::text IS NULL OR job.queue = %(queue)s)
    AND (%(error_code)s::text IS NULL OR job.error ->> 'code' = %(error_code)s)
    AND (%(dismissed)s::boolean IS NULL OR (job.dismissed_at IS NOT NULL) = %(dismissed)s)
    AND (%(owned)s::boolean IS NULL OR (job.owner IS NOT NULL) = %(owned)s)
    AND (%(created_from)s::timestamptz IS NULL OR job.created_at >= %(created_from)s)
    AND (%(created_to)s::timestamptz IS NULL OR job.created_at < %(created_to)s)

-- part: before
(job.created_at, job.id) < (%(before_time)s::timestamptz, %(before_id)s::uuid)

-- part: tenants
-- The tenant that was named, or all of them, each found by one step along the index.
everyone AS (
    (SELECT tenant FROM windlass.job WHERE %(tenant)s::text IS NULL ORDER BY tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT job.tenant FROM windlass.job WHERE job.tenant > everyone.tenant ORDER BY job.tenant LIMIT 1)
    FROM everyone WHERE everyone.tenant IS NOT NULL
),
tenants AS (
    SELECT tenant FROM everyone WHERE tenant IS NOT NULL
    UNION ALL
    SELECT %(tenant)s::text WHERE %(tenant)s::text IS NOT NULL
)

-- part: members
-- A pipeline: its root, the jobs chained to it, and everything below them.
member AS (
    (
        SELECT id FROM windlass.job
        WHERE id = %(pipeline_id)s AND pipeline_id = %(pipeline_id)s AND tenant = coalesce(%(tenant)s, tenant)
        UNION
        SELECT id FROM windlass.job
        WHERE pipeline_id = %(pipeline_id)s AND parent_job_id IS NULL AND pipeline_id <> id
            AND tenant = coalesce(%(tenant)s, tenant)
    )
    UNION ALL
    SELECT job.id FROM member JOIN windlass.job ON job.parent_job_id = member.id
)

-- name: list_jobs
-- The walk looks at `scan_max` rows of each tenant and stops as soon as the page is full.
WITH RECURSIVE :tenants
SELECT found.id, found.created_at
FROM tenants
CROSS JOIN LATERAL (
    SELECT job.id, job.created_at
    FROM (
        SELECT * FROM windlass.job
        WHERE job.tenant = tenants.tenant AND :before
        ORDER BY job.created_at DESC, job.id DESC
        LIMIT %(scan_max)s
    ) AS job
    WHERE :matches
    ORDER BY job.created_at DESC, job.id DESC
    LIMIT %(limit)s
) AS found
ORDER BY found.created_at DESC, found.id DESC
LIMIT %(limit)s

-- name: walked_to
-- Where the walk of `list_jobs` had to stop, if it did not come to the end of a tenant's jobs.
WITH RECURSIVE :tenants
SELECT stop.id, stop.created_at
FROM tenants
CROSS JOIN LATERAL (
    SELECT job.id, job.created_at FROM windlass.job
    WHERE job.tenant = tenants.tenant AND :before
    ORDER BY job.created_at DESC, job.id DESC
    OFFSET %(scan_max)s - 1
    LIMIT 1
) AS stop
ORDER BY stop.created_at DESC, stop.id DESC
LIMIT 1

-- name: list_children
SELECT job.id, job.created_at FROM windlass.job
WHERE job.parent_job_id = %(parent_job_id)s AND job.tenant = coalesce(%(tenant)s, job.tenant)
    AND (%(pipeline_id)s::uuid IS NULL OR job.pipeline_id = %(pipeline_id)s)
    AND :before AND :matches
ORDER BY job.created_at DESC, job.id DESC
LIMIT %(limit)s

-- name: list_pipeline
WITH RECURSIVE :members
SELECT job.id, job.created_at
FROM member JOIN windlass.job ON job.id = member.id
WHERE :before AND :matches
ORDER BY job.created_at DESC, job.id DESC
LIMIT %(limit)s

-- name: pipeline
WITH RECURSIVE :members
SELECT job.job_type, job.status::text, count(*), min(job.created_at), min(job.started_at), max(job.finished_at)
FROM member JOIN windlass.job ON job.id = member.id
GROUP BY job.job_type, job.status
ORDER BY min(job.created_at), job.job_type

-- name: open_members
WITH RECURSIVE :members
SELECT job.id
FROM member JOIN windlass.job ON job.id = member.id
WHERE job.finished_at IS NULL
LIMIT %(limit)s

-- name: waiting_on
-- The facts about queued jobs. A worker counts while it beats; how many slots it uses is as old as its last beat.
SELECT job.id, job.run_after > :now, queue.paused_at IS NOT NULL, holder.id, holder.status::text, rival.id,
       job.rescues >= 2, crew.known, crew.free
FROM windlass.job
LEFT JOIN windlass.queue ON queue.name = job.queue
LEFT JOIN LATERAL (
    SELECT other.id, other.status FROM windlass.job AS other
    WHERE other.tenant = job.tenant AND other.exclusive_key = job.exclusive_key AND other.is_current
        AND other.id <> job.id AND (other.finished_at IS NULL OR other.lease_until >= :now)
) AS holder ON job.exclusive_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT other.id FROM windlass.job AS other
    WHERE other.tenant = job.tenant AND other.exclusive_key = job.exclusive_key AND other.finished_at IS NULL
        AND other.status = 'QUEUED' AND other.run_after <= :now AND other.rescues < 2
        AND (other.priority, other.run_after, other.id) < (job.priority, job.run_after, job.id)
    ORDER BY other.priority, other.run_after, other.id
    LIMIT 1
) AS rival ON job.exclusive_key IS NOT NULL AND NOT job.is_current
CROSS JOIN LATERAL (
    SELECT count(*) AS known, coalesce(bool_or(worker.running < worker.concurrency), false) AS free
    FROM windlass.worker
    WHERE worker.heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s) AND worker.stopping_at IS NULL
        AND job.job_type = ANY(worker.operations) AND (worker.queues IS NULL OR job.queue = ANY(worker.queues))
) AS crew
WHERE job.id = ANY(%(ids)s::uuid[]) AND job.status = 'QUEUED'

-- name: inbox
-- Failed jobs that nobody has dismissed, by type and cause; at most `count_max` are counted.
WITH counted AS (
    SELECT job_type, error ->> 'code' AS code, error ->> 'kind' AS kind, finished_at
    FROM windlass.job
    WHERE status = 'FAILED' AND dismissed_at IS NULL AND tenant = coalesce(%(tenant)s, tenant)
        AND (%(job_type)s::text IS NULL OR job_type = %(job_type)s)
    LIMIT %(count_max)s
),
grouped AS (
    SELECT job_type, code, min(kind) AS kind, count(*) AS n, min(finished_at) AS first_at, max(finished_at) AS last_at
    FROM counted GROUP BY job_type, code
    ORDER BY count(*) DESC, max(finished_at) DESC, job_type, code
    LIMIT %(limit)s
)
SELECT grouped.job_type, grouped.code, grouped.kind, grouped.n, grouped.first_at, grouped.last_at,
       latest.ids, latest.messages
FROM grouped
CROSS JOIN LATERAL (
    SELECT array_agg(id) AS ids, array_agg(message) AS messages
    FROM (
        SELECT id, error ->> 'message' AS message FROM windlass.job
        WHERE status = 'FAILED' AND dismissed_at IS NULL AND tenant = coalesce(%(tenant)s, tenant)
            AND job_type = grouped.job_type AND error ->> 'code' IS NOT DISTINCT FROM grouped.code
        ORDER BY finished_at DESC, id DESC
        LIMIT %(samples)s
    ) AS newest
) AS latest
ORDER BY grouped.n DESC, grouped.last_at DESC, grouped.job_type, grouped.code

-- name: queue_depths
-- Without a tenant every queue that was ever used; with one, those in which it has open jobs.
WITH queued AS (
    SELECT queue, count(*) FILTER (WHERE run_after <= :now) AS due, count(*) FILTER (WHERE run_after > :now) AS later,
           min(run_after) AS first_at
    FROM windlass.job
    WHERE status = 'QUEUED' AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
    GROUP BY queue
),
held AS (
    SELECT queue, count(*) AS running FROM windlass.job
    WHERE locked_by IS NOT NULL AND status = 'RUNNING' AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
    GROUP BY queue
)
SELECT queue.name, queue.paused_at, coalesce(queued.due, 0), coalesce(queued.later, 0), coalesce(held.running, 0),
       CASE WHEN queued.first_at <= :now THEN extract(epoch FROM :now - queued.first_at)::float8 END
FROM windlass.queue
LEFT JOIN queued ON queued.queue = queue.name
LEFT JOIN held ON held.queue = queue.name
WHERE %(tenant)s::text IS NULL OR queued.queue IS NOT NULL OR held.queue IS NOT NULL
ORDER BY queue.name
LIMIT %(limit)s

-- name: workers
SELECT id, host, pid, version, queues, operations, concurrency, running, started_at, heartbeat_at, stopping_at,
       heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
FROM windlass.worker ORDER BY started_at, id
LIMIT %(limit)s

-- name: operations
SELECT operation.name, operation.description, operation.payload_schema, operation.defaults, operation.published_at,
       (SELECT count(*) FROM windlass.worker
        WHERE operation.name = ANY(worker.operations) AND worker.stopping_at IS NULL
            AND worker.heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s))
FROM windlass.operation ORDER BY operation.name
LIMIT %(limit)s
