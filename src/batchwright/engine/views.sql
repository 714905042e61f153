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
    AND (%(pipeline_id)s::uuid IS NULL OR job.pipeline_id = %(pipeline_id)s)
    AND (%(parent_job_id)s::uuid IS NULL OR job.parent_job_id = %(parent_job_id)s)
    AND (%(tenant)s::text IS NULL OR job.tenant = %(tenant)s)

-- part: before
(job.created_at, job.id) < (%(before_time)s::timestamptz, %(before_id)s::uuid)

-- part: members
-- A pipeline: its root, the jobs chained to it, and everything below them, level by level. The children of each are
-- looked up one by one, so that whoever wants only some of the members does not pay for all.
member AS (
    (
        SELECT id FROM batchwright.job
        WHERE id = %(pipeline_id)s AND pipeline_id = %(pipeline_id)s AND tenant = coalesce(%(tenant)s, tenant)
        UNION
        SELECT id FROM batchwright.job
        WHERE pipeline_id = %(pipeline_id)s AND parent_job_id IS NULL AND pipeline_id <> id
            AND tenant = coalesce(%(tenant)s, tenant)
    )
    UNION ALL
    SELECT child.id
    FROM member
    CROSS JOIN LATERAL (
        SELECT job.id FROM batchwright.job WHERE job.parent_job_id = member.id OFFSET 0
    ) AS child
)

-- part: places
-- What a walk follows, the newest first: the jobs of a tenant, or of all, or those that have failed. Two of the three
-- are never looked at.
(
    (
        SELECT job.created_at, job.id FROM batchwright.listing AS job
        WHERE job.tenant = %(tenant)s AND NOT %(is_failed)s::boolean AND :before
        ORDER BY job.created_at DESC, job.id DESC
        LIMIT %(scan_max)s
    )
    UNION ALL
    (
        SELECT job.created_at, job.id FROM batchwright.listing AS job
        WHERE %(tenant)s::text IS NULL AND NOT %(is_failed)s::boolean AND :before
        ORDER BY job.created_at DESC, job.id DESC
        LIMIT %(scan_max)s
    )
    UNION ALL
    (
        SELECT job.created_at, job.id FROM batchwright.job AS job
        WHERE job.status = 'FAILED' AND %(is_failed)s::boolean AND :before
        ORDER BY job.created_at DESC, job.id DESC
        LIMIT %(scan_max)s
    )
)

-- name: list_jobs
-- The walk looks at `scan_max` rows and stops as soon as the page is full. Where it had to stop with a page that is not
-- full comes as one more row: older jobs were not looked at. It is the same statement, so that nothing which is removed
-- between the two can move the place. No walk has a lower bound: before PostgreSQL 17 such a bound does not end a walk
-- among jobs that were created in one moment.
-- The jobs are looked up one by one: a join would tempt the planner to walk all of them.
WITH found AS MATERIALIZED (
    SELECT listed.id, listed.created_at
    FROM (
        SELECT place.id, place.created_at FROM :places AS place
        ORDER BY place.created_at DESC, place.id DESC
    ) AS listed
    CROSS JOIN LATERAL (
        SELECT FROM batchwright.job WHERE job.id = listed.id AND :matches OFFSET 0
    ) AS wanted
    ORDER BY listed.created_at DESC, listed.id DESC
    LIMIT %(limit)s
),
stopped AS (
    SELECT place.id, place.created_at FROM :places AS place
    WHERE (SELECT count(*) FROM found) < %(limit)s
    ORDER BY place.created_at DESC, place.id DESC
    OFFSET %(scan_max)s - 1
    LIMIT 1
)
SELECT id, created_at, false FROM found
UNION ALL
SELECT id, created_at, true FROM stopped

-- part: page_of_few
-- A page of them, sorted. If there are more than `scan_max`, a row without an id says so, and when the last of them was
-- there at the latest, if that is known; there is no page.
few AS MATERIALIZED (
    SELECT array_agg(id) AS ids, count(*) > %(scan_max)s AS is_more
    FROM (SELECT id FROM candidate LIMIT %(scan_max)s + 1) AS bounded
)
SELECT NULL::uuid, (SELECT ended_at FROM latest), true FROM few WHERE is_more
UNION ALL
(
    SELECT job.id, job.created_at, false FROM batchwright.job
    WHERE job.id = ANY((SELECT CASE WHEN NOT is_more THEN ids END FROM few)::uuid[]) AND :before AND :matches
    ORDER BY job.created_at DESC, job.id DESC
    LIMIT %(limit)s
)

-- name: list_by_status
-- Jobs of the wanted statuses are found in the indexes of these statuses. One that moves between two of them while we
-- look is found once or twice; the page has it once.
WITH candidate AS (
    SELECT id FROM batchwright.job
    WHERE 'QUEUED' = ANY(%(statuses)s::text[]) AND %(queue)s::text IS NULL AND status = 'QUEUED'
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'QUEUED' = ANY(%(statuses)s::text[]) AND queue = %(queue)s AND status = 'QUEUED'
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'RUNNING' = ANY(%(statuses)s::text[]) AND status = 'RUNNING' AND locked_by IS NOT NULL
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'RUNNING' = ANY(%(statuses)s::text[]) AND status = 'RUNNING' AND locked_by IS NULL
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'CANCELLED' = ANY(%(statuses)s::text[]) AND status = 'CANCELLED' AND finished_at IS NOT NULL
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'FAILED' = ANY(%(statuses)s::text[]) AND status = 'FAILED' AND finished_at IS NOT NULL
    UNION ALL
    SELECT id FROM batchwright.job
    WHERE 'SUCCEEDED' = ANY(%(statuses)s::text[]) AND status = 'SUCCEEDED' AND finished_at IS NOT NULL
),
latest AS (SELECT NULL::timestamptz AS ended_at),
:page_of_few

-- name: list_children
-- No child is younger than the end of its parent.
WITH candidate AS (
    SELECT id FROM batchwright.job WHERE parent_job_id = %(parent_job_id)s
),
latest AS (
    SELECT finished_at AS ended_at FROM batchwright.job WHERE id = %(parent_job_id)s
),
:page_of_few

-- name: list_pipeline
-- When all that have no parent have ended, nothing can come any more.
WITH RECURSIVE :members,
candidate AS (
    SELECT id FROM member
),
latest AS (
    SELECT CASE WHEN bool_and(finished_at IS NOT NULL) THEN max(finished_at) END AS ended_at
    FROM (
        SELECT finished_at FROM batchwright.job WHERE id = %(pipeline_id)s
        UNION ALL
        SELECT finished_at FROM batchwright.job
        WHERE pipeline_id = %(pipeline_id)s AND parent_job_id IS NULL AND pipeline_id <> id
    ) AS top
),
:page_of_few

-- name: pipeline
-- At most `count_max` jobs are counted; those without a parent, which decide how it ends, come first.
WITH RECURSIVE :members,
counted AS MATERIALIZED (
    SELECT id FROM member LIMIT %(count_max)s
)
SELECT job.job_type, job.status::text, count(*), count(*) FILTER (WHERE job.parent_job_id IS NULL),
       min(job.created_at), min(job.started_at), max(job.finished_at)
FROM batchwright.job
WHERE job.id = ANY(ARRAY(SELECT id FROM counted))
GROUP BY job.job_type, job.status
ORDER BY min(job.created_at), job.job_type

-- name: open_members
-- Parents before their children.
WITH RECURSIVE :members
SELECT job.id
FROM member JOIN batchwright.job ON job.id = member.id
WHERE job.finished_at IS NULL AND job.owner IS NULL
ORDER BY job.parent_job_id IS NOT NULL, job.created_at, job.id
LIMIT %(limit)s

-- name: with_ancestors
-- These jobs, and whoever waits for them and is meant as well: a verb on both begins at the top.
WITH RECURSIVE meant AS (
    SELECT id, parent_job_id FROM batchwright.job WHERE id = ANY(%(ids)s::uuid[])
    UNION
    SELECT job.id, job.parent_job_id FROM meant JOIN batchwright.job ON job.id = meant.parent_job_id WHERE :matches
)
SELECT id FROM meant

-- name: waiting_on
-- The facts about queued jobs. A worker counts while it beats; how many slots it uses is as old as its last beat.
-- Another job of the key goes first unless a worker that could run this one cannot run that one: so says `claim`.
WITH crew AS MATERIALIZED (
    SELECT id, queues, operations, running < concurrency AS is_free, on_demand_types, on_demand_queues
    FROM batchwright.worker
    WHERE heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s) AND stopping_at IS NULL
)
SELECT job.id, job.run_after > :now, queue.paused_at IS NOT NULL, holder.id, holder.status::text, rival.id,
       job.rescues >= :deaths_max, able.workers, able.is_free
FROM batchwright.job
LEFT JOIN batchwright.queue ON queue.name = job.queue
LEFT JOIN LATERAL (
    SELECT other.id, other.status FROM batchwright.job AS other
    WHERE other.tenant = job.tenant AND other.exclusive_key = job.exclusive_key AND other.is_current
        AND other.id <> job.id AND (other.finished_at IS NULL OR other.lease_until >= :now)
) AS holder ON job.exclusive_key IS NOT NULL
LEFT JOIN LATERAL (
    SELECT other.id FROM batchwright.job AS other
    WHERE other.tenant = job.tenant AND other.exclusive_key = job.exclusive_key AND other.finished_at IS NULL
        AND other.status = 'QUEUED' AND other.run_after <= :now AND other.rescues < :deaths_max
        AND (other.priority, other.run_after, other.id) < (job.priority, job.run_after, job.id)
        AND other.queue <> ALL (:paused_queues)
        AND NOT EXISTS (
            SELECT FROM crew
            WHERE job.job_type = ANY(crew.operations) AND (crew.queues IS NULL OR job.queue = ANY(crew.queues))
                AND NOT (other.job_type = ANY(crew.operations)
                         AND (crew.queues IS NULL OR other.queue = ANY(crew.queues))))
    ORDER BY other.priority, other.run_after, other.id
    LIMIT 1
) AS rival ON job.exclusive_key IS NOT NULL AND NOT job.is_current
CROSS JOIN LATERAL (
    SELECT count(*) AS workers,
        coalesce(bool_or(crew.is_free OR job.job_type = ANY(crew.on_demand_types)), false) AS is_free
    FROM crew
    WHERE job.job_type = ANY(crew.operations) AND CASE
        WHEN job.job_type = ANY(crew.on_demand_types) THEN EXISTS (
            SELECT FROM unnest(crew.on_demand_queues) AS served (queue)
            WHERE job.queue = served.queue OR (right(served.queue, 1) = '/' AND starts_with(job.queue, served.queue)))
        ELSE crew.queues IS NULL OR job.queue = ANY(crew.queues)
    END
) AS able
WHERE job.id = ANY(%(ids)s::uuid[]) AND job.status = 'QUEUED'

-- part: tenants
-- The tenant that was named, or all of them, each found by one step along the index.
everyone AS (
    (SELECT tenant FROM batchwright.listing WHERE %(tenant)s::text IS NULL ORDER BY tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT job.tenant FROM batchwright.listing AS job WHERE job.tenant > everyone.tenant
            ORDER BY job.tenant LIMIT 1)
    FROM everyone WHERE everyone.tenant IS NOT NULL
),
tenants AS (
    SELECT tenant FROM everyone WHERE tenant IS NOT NULL
    UNION ALL
    SELECT %(tenant)s::text WHERE %(tenant)s::text IS NOT NULL
)

-- name: inbox
-- Failed jobs that nobody has dismissed, by type and cause; at most `count_max` are counted. Jobs that belong to an
-- object are that object's business.
WITH RECURSIVE :tenants,
counted AS (
    SELECT failed.*
    FROM tenants
    CROSS JOIN LATERAL (
        SELECT job.id, job.job_type, job.error ->> 'code' AS code, job.error ->> 'kind' AS kind, job.finished_at
        FROM batchwright.job
        WHERE job.status = 'FAILED' AND job.dismissed_at IS NULL AND job.tenant = tenants.tenant
            AND (%(job_type)s::text IS NULL OR job.job_type = %(job_type)s) AND job.owner IS NULL
    ) AS failed
    LIMIT %(count_max)s
),
grouped AS (
    SELECT job_type, code, min(kind) AS kind, count(*) AS n, min(finished_at) AS first_at, max(finished_at) AS last_at,
           (array_agg(id ORDER BY finished_at DESC, id DESC))[1:%(samples)s] AS latest
    FROM counted GROUP BY job_type, code
    ORDER BY count(*) DESC, max(finished_at) DESC, job_type, code
    LIMIT %(limit)s
)
SELECT grouped.job_type, grouped.code, grouped.kind, grouped.n, grouped.first_at, grouped.last_at, grouped.latest,
       (SELECT job.error ->> 'message' FROM batchwright.job WHERE job.id = grouped.latest[1])
FROM grouped
ORDER BY grouped.n DESC, grouped.last_at DESC, grouped.job_type, grouped.code

-- name: queue_depths
-- Without a tenant every queue that was ever used; with one, those in which it has open jobs. Of each queue the first
-- `count_max` jobs that wait are looked at, by priority and time; there may be more. The oldest job that is due is the
-- first of its priority.
WITH held AS MATERIALIZED (
    SELECT queue, count(*) AS running FROM batchwright.job
    WHERE locked_by IS NOT NULL AND status = 'RUNNING' AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
    GROUP BY queue
),
clock AS MATERIALIZED (SELECT :now AS now)
SELECT queue.name, queue.paused_at, queued.due, queued.later, coalesce(held.running, 0),
       extract(epoch FROM clock.now - coalesce(queued.first_at, oldest.first_at))::float8,
       queued.looked >= %(count_max)s
FROM clock
CROSS JOIN batchwright.queue
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE is_wanted AND run_after <= clock.now) AS due,
           count(*) FILTER (WHERE is_wanted AND run_after > clock.now) AS later,
           min(run_after) FILTER (WHERE is_wanted AND run_after <= clock.now AND %(tenant)s::text IS NOT NULL) AS first_at,
           count(*) AS looked
    FROM (
        (
            SELECT run_after, true AS is_wanted FROM batchwright.job
            WHERE job.queue = queue.name AND status = 'QUEUED' AND %(tenant)s::text IS NULL
            LIMIT %(count_max)s
        )
        UNION ALL
        (
            SELECT run_after, tenant = %(tenant)s FROM batchwright.job
            WHERE job.queue = queue.name AND status = 'QUEUED' AND %(tenant)s::text IS NOT NULL
            ORDER BY priority, run_after, id
            LIMIT %(count_max)s
        )
    ) AS bounded
) AS queued
LEFT JOIN LATERAL (
    SELECT min(first.run_after) AS first_at
    FROM generate_series(0, 9) AS lane (priority)
    CROSS JOIN LATERAL (
        SELECT run_after FROM batchwright.job
        WHERE job.queue = queue.name AND job.priority = lane.priority::smallint AND status = 'QUEUED'
            AND run_after <= clock.now
        ORDER BY run_after LIMIT 1
    ) AS first
) AS oldest ON %(tenant)s::text IS NULL
LEFT JOIN held ON held.queue = queue.name
WHERE (%(name)s::text IS NULL OR queue.name = %(name)s)
    AND (%(tenant)s::text IS NULL OR queued.due + queued.later > 0 OR held.queue IS NOT NULL)
ORDER BY queue.name
LIMIT %(limit)s

-- name: workers
SELECT id, host, pid, version, queues, operations, concurrency, running, started_at, heartbeat_at, stopping_at,
       heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
FROM batchwright.worker WHERE left_at IS NULL ORDER BY started_at, id
LIMIT %(limit)s

-- name: operations
SELECT operation.name, operation.description, operation.payload_schema, operation.defaults, operation.published_at,
       (SELECT count(*) FROM batchwright.worker
        WHERE operation.name = ANY(worker.operations) AND worker.stopping_at IS NULL
            AND worker.heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s))
FROM batchwright.operation ORDER BY operation.name
LIMIT %(limit)s
