-- Views for people: lists, reasons for waiting, the inbox, pipelines and queues. Nothing here changes a job.

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
    AND (%(payload_path)s::text[] IS NULL OR job.payload #>> %(payload_path)s::text[] = %(payload_value)s)

-- part: before
(job.created_at, job.id) < (%(before_time)s::timestamptz, %(before_id)s::uuid)

-- part: members
-- A pipeline: its root, the jobs chained to it, and everything below them, level by level. The children of each are
-- looked up one by one, so that a query for some members does not pay for all.
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
-- The index that a walk follows, newest job first: of one tenant, of all, or of failed jobs. Only one of the three is
-- read.
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
-- The walk examines `scan_max` rows and stops as soon as the page is full. If it had to stop before that, one more row
-- says where: older jobs were not examined. This is one statement, so that a row removed in between cannot move the
-- position. No walk has a lower bound: before PostgreSQL 17 such a bound does not end a walk among jobs that were
-- created at the same moment.
-- The jobs are looked up one by one: with a join, the planner might walk all of them.
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
-- A sorted page of them. If there are more than `scan_max`, there is no page, but a row without an id. It also has the
-- latest possible time of the last of them, if that is known.
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
-- Jobs of the wanted statuses are found in the indexes of these statuses. One that moves between two of them
-- meanwhile is found once or twice; the page has it once.
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
-- No child is created after the end of its parent.
WITH candidate AS (
    SELECT id FROM batchwright.job WHERE parent_job_id = %(parent_job_id)s
),
latest AS (
    SELECT finished_at AS ended_at FROM batchwright.job WHERE id = %(parent_job_id)s
),
:page_of_few

-- name: list_pipeline
-- When all jobs without a parent have ended, no more jobs can follow.
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

-- part: open_tops
-- Jobs of a pipeline that have no parent and have not ended. A parent is open as long as one of its children is.
(
    SELECT id, owner FROM batchwright.job
    WHERE id = %(pipeline_id)s AND pipeline_id = %(pipeline_id)s AND finished_at IS NULL
        AND tenant = coalesce(%(tenant)s, tenant)
    UNION ALL
    SELECT id, owner FROM batchwright.job
    WHERE pipeline_id = %(pipeline_id)s AND parent_job_id IS NULL AND pipeline_id <> id AND finished_at IS NULL
        AND tenant = coalesce(%(tenant)s, tenant)
)

-- name: pipeline
-- At most `count_max` jobs are counted; those without a parent, which decide how it ends, come first. The check for
-- open jobs without a parent includes those that were not counted.
WITH RECURSIVE :members,
counted AS MATERIALIZED (
    SELECT id FROM member LIMIT %(count_max)s
)
SELECT job.job_type, job.status::text, count(*), count(*) FILTER (WHERE job.parent_job_id IS NULL),
       min(job.created_at), min(job.started_at), max(job.finished_at), EXISTS (SELECT FROM :open_tops AS top)
FROM batchwright.job
WHERE job.id = ANY(ARRAY(SELECT id FROM counted))
GROUP BY job.job_type, job.status
ORDER BY min(job.created_at), job.job_type

-- name: open_members
-- Jobs without a parent first: a verb on them includes their descendants. Only when none of those is left, search the
-- first `scan_max` of all jobs for one that was left over.
WITH RECURSIVE :members,
top AS MATERIALIZED (
    SELECT id FROM :open_tops AS one WHERE owner IS NULL LIMIT %(limit)s
),
left_over AS (
    SELECT bounded.id
    FROM (SELECT id FROM member LIMIT %(scan_max)s) AS bounded
    CROSS JOIN LATERAL (
        SELECT FROM batchwright.job
        WHERE job.id = bounded.id AND job.finished_at IS NULL AND job.owner IS NULL
        OFFSET 0
    ) AS open
    WHERE NOT EXISTS (SELECT FROM top)
    LIMIT %(limit)s
)
SELECT id FROM top
UNION ALL
SELECT id FROM left_over

-- name: with_ancestors
-- These jobs, and the matching jobs that wait for them: a verb on both begins at the top.
WITH RECURSIVE matching AS (
    SELECT id, parent_job_id FROM batchwright.job WHERE id = ANY(%(ids)s::uuid[])
    UNION
    SELECT job.id, job.parent_job_id FROM matching JOIN batchwright.job ON job.id = matching.parent_job_id WHERE :matches
)
SELECT id FROM matching

-- name: waiting_on
-- The facts about queued jobs. A worker counts while its heartbeat is recent; its used slots are as old as that.
-- As in `claim`, another job of the key goes first, unless a worker that could run this one cannot run that one.
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

-- part: in_inbox
job.status = 'FAILED' AND job.dismissed_at IS NULL

-- part: code
coalesce(job.error ->> 'code', '')

-- name: inbox
-- Failed jobs that were not dismissed, by type and cause. The groups of each tenant are found first, each by one step
-- along the index, so that none is missed behind a large one; then each group is read, latest first, up to its share of
-- `count_max`. Jobs that belong to an object are left to that object.
WITH RECURSIVE head AS (
    (
        SELECT job.tenant, job.job_type, :code AS code FROM batchwright.job
        WHERE :in_inbox AND job.tenant >= coalesce(%(tenant)s::text, '')
        ORDER BY job.tenant, job.job_type, :code
        LIMIT 1
    )
    UNION ALL
    SELECT next.tenant, next.job_type, next.code
    FROM head
    CROSS JOIN LATERAL (
        SELECT job.tenant, job.job_type, :code AS code FROM batchwright.job
        WHERE :in_inbox AND (job.tenant, job.job_type, :code) > (head.tenant, head.job_type, head.code)
        ORDER BY job.tenant, job.job_type, :code
        LIMIT 1
    ) AS next
    WHERE next.tenant = coalesce(%(tenant)s, next.tenant)
),
known AS MATERIALIZED (
    SELECT * FROM head
    WHERE tenant = coalesce(%(tenant)s, tenant) AND job_type = coalesce(%(job_type)s, job_type)
    LIMIT %(groups_max)s + 1
),
share AS MATERIALIZED (
    SELECT greatest(20, %(count_max)s / greatest(1, count(*))) AS jobs, count(*) > %(groups_max)s AS is_cut FROM known
),
counted AS (
    SELECT known.job_type, known.code, failed.*,
        (
            SELECT job.finished_at FROM batchwright.job
            WHERE :in_inbox AND job.tenant = known.tenant AND job.job_type = known.job_type AND :code = known.code
            ORDER BY job.finished_at
            LIMIT 1
        ) AS first_at
    FROM known
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE owner IS NULL) AS n, count(*) > (SELECT jobs FROM share) AS has_more,
            min(kind) AS kind, max(finished_at) FILTER (WHERE owner IS NULL) AS last_at,
            (array_agg(id ORDER BY finished_at DESC, id DESC) FILTER (WHERE owner IS NULL))[1:%(samples)s] AS latest
        FROM (
            SELECT job.id, job.owner, job.error ->> 'kind' AS kind, job.finished_at FROM batchwright.job
            WHERE :in_inbox AND job.tenant = known.tenant AND job.job_type = known.job_type AND :code = known.code
            ORDER BY job.finished_at DESC
            LIMIT (SELECT jobs + 1 FROM share)
        ) AS looked_at
    ) AS failed
    WHERE failed.n > 0
),
grouped AS (
    SELECT job_type, code, min(kind) AS kind, sum(n)::bigint AS n, min(first_at) AS first_at, max(last_at) AS last_at,
        bool_or(has_more) OR (SELECT is_cut FROM share) AS has_more
    FROM counted GROUP BY job_type, code
    ORDER BY sum(n) DESC, max(last_at) DESC, job_type, code
    LIMIT %(limit)s
)
SELECT grouped.job_type, nullif(grouped.code, ''), grouped.kind, grouped.n, grouped.first_at, grouped.last_at,
    samples.latest, samples.message, grouped.has_more
FROM grouped
CROSS JOIN LATERAL (
    SELECT (array_agg(job.id ORDER BY job.finished_at DESC, job.id DESC))[1:%(samples)s] AS latest,
        (array_agg(job.error ->> 'message' ORDER BY job.finished_at DESC, job.id DESC))[1] AS message
    FROM batchwright.job
    WHERE job.id = ANY(ARRAY(
        SELECT unnest(counted.latest) FROM counted
        WHERE counted.job_type = grouped.job_type AND counted.code = grouped.code))
) AS samples
ORDER BY grouped.n DESC, grouped.last_at DESC, grouped.job_type, grouped.code

-- part: clock
clock AS MATERIALIZED (SELECT :now AS now)

-- name: queue_depths
-- Every queue that was ever used. Of each, the first waiting jobs are counted, up to `count_max`, or up to its share of
-- `total_max` if there are many queues; there may be more. The oldest due job is the first of its priority.
WITH share AS MATERIALIZED (
    SELECT least(%(count_max)s, greatest(100, %(total_max)s / greatest(1, count(*)))) AS most
    FROM batchwright.queue
    WHERE %(name)s::text IS NULL OR queue.name = %(name)s
),
held AS MATERIALIZED (
    SELECT queue, count(*) AS running FROM batchwright.job
    WHERE locked_by IS NOT NULL AND status = 'RUNNING'
    GROUP BY queue
),
:clock
SELECT queue.name, queue.paused_at, queued.due, queued.later, coalesce(held.running, 0),
       extract(epoch FROM clock.now - oldest.first_at)::float8, queued.looked >= share.most
FROM clock
CROSS JOIN share
CROSS JOIN batchwright.queue
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE run_after <= clock.now) AS due, count(*) FILTER (WHERE run_after > clock.now) AS later,
           count(*) AS looked
    FROM (
        SELECT run_after FROM batchwright.job
        WHERE job.queue = queue.name AND status = 'QUEUED'
        LIMIT (SELECT most FROM share)
    ) AS bounded
) AS queued
CROSS JOIN LATERAL (
    SELECT min(first.run_after) AS first_at
    FROM generate_series(0, 9) AS lane (priority)
    CROSS JOIN LATERAL (
        SELECT run_after FROM batchwright.job
        WHERE job.queue = queue.name AND job.priority = lane.priority::smallint AND status = 'QUEUED'
            AND run_after <= clock.now
        ORDER BY run_after LIMIT 1
    ) AS first
) AS oldest
LEFT JOIN held ON held.queue = queue.name
WHERE %(name)s::text IS NULL OR queue.name = %(name)s
ORDER BY queue.name
LIMIT %(limit)s

-- name: queues_of_tenant
-- Queues in which the tenant has open jobs. The index of waiting jobs does not contain the tenant. So this reads the
-- tenant's newest `listed_max` jobs, which are all that most tenants have; if it has more, also the first `count_max`
-- waiting jobs of each queue, of any tenant. A longer queue may have jobs of the tenant that were not seen: a row
-- without a name says so, because the absence of a queue would then prove nothing.
WITH listed AS MATERIALIZED (
    SELECT id FROM batchwright.listing
    WHERE tenant = %(tenant)s
    ORDER BY created_at DESC, id DESC
    LIMIT %(listed_max)s + 1
),
first AS MATERIALIZED (
    SELECT one.*
    FROM batchwright.queue
    CROSS JOIN LATERAL (
        SELECT id, queue, tenant, run_after FROM batchwright.job
        WHERE job.queue = queue.name AND status = 'QUEUED'
        ORDER BY priority, run_after, id
        LIMIT %(count_max)s + 1
    ) AS one
    WHERE (SELECT count(*) FROM listed) > %(listed_max)s
),
long AS MATERIALIZED (
    SELECT queue FROM first GROUP BY queue HAVING count(*) > %(count_max)s
),
waiting AS (
    SELECT job.id, job.queue, job.run_after
    FROM listed
    CROSS JOIN LATERAL (
        SELECT id, queue, run_after FROM batchwright.job WHERE job.id = listed.id AND status = 'QUEUED' OFFSET 0
    ) AS job
    UNION
    SELECT id, queue, run_after FROM first WHERE tenant = %(tenant)s
),
:clock,
queued AS (
    SELECT queue, count(*) FILTER (WHERE run_after <= clock.now) AS due,
        count(*) FILTER (WHERE run_after > clock.now) AS later,
        min(run_after) FILTER (WHERE run_after <= clock.now) AS first_at
    FROM waiting CROSS JOIN clock
    GROUP BY queue
),
held AS (
    SELECT queue, count(*) AS running FROM batchwright.job
    WHERE locked_by IS NOT NULL AND status = 'RUNNING' AND tenant = %(tenant)s
    GROUP BY queue
)
(
    SELECT queue.name, queue.paused_at, coalesce(queued.due, 0), coalesce(queued.later, 0), coalesce(held.running, 0),
        extract(epoch FROM clock.now - queued.first_at)::float8, queue.name IN (SELECT queue FROM long)
    FROM clock CROSS JOIN batchwright.queue
    LEFT JOIN queued ON queued.queue = queue.name
    LEFT JOIN held ON held.queue = queue.name
    WHERE queued.queue IS NOT NULL OR held.queue IS NOT NULL
    ORDER BY queue.name
    LIMIT %(limit)s
)
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, true WHERE EXISTS (SELECT FROM long)

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
