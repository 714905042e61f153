-- Every statement that reads or writes batchwright.job, one per verb. Nothing else writes a status.
-- `:now` is the caller's clock if a test passes one, otherwise the server's.

-- part: is_held
-- A worker holds the job. `status::text` here and `IS NOT DISTINCT FROM` below match no index on purpose: otherwise the
-- planner might walk that index instead of using the primary key.
job.status::text = 'RUNNING' AND job.lease_until IS NOT NULL

-- part: settle_fence
-- The same claim of the same worker. After a failover that lost commits, a claim number may be given a second time; the
-- worker's id tells the two claims apart.
job.id = done.id AND job.claims = done.claim AND job.locked_by IS NOT DISTINCT FROM %(worker)s::text AND :is_held

-- part: put_off
-- When a job becomes due again: after its delay, or at its deadline if that is earlier.
greatest(:now, least(:now + make_interval(secs => done.delay_seconds),
                     CASE WHEN NOT job.deadline_passed THEN job.deadline END))

-- part: has_left_its_key
-- The job was the last to hold its key: it has ended, and no worker runs it any more.
job.is_current AND job.finished_at IS NOT NULL AND (job.lease_until IS NULL OR job.lease_until < :now)

-- part: key_number
hashtextextended(tenant || E'\x1f' || exclusive_key, 0)

-- part: event_columns
id, job_id, ts, event, level, status::text, claim, attempt, worker, message, fields,
       model, prompt_tokens, completion_tokens, cost, error_kind

-- name: enqueue
WITH input AS (
    SELECT *, least(deadline, :now + make_interval(secs => deadline_seconds)) AS last_moment
    FROM jsonb_to_recordset(%(jobs)s::jsonb) AS input (
        id uuid, job_type text, queue text, tenant text, owner text, priority smallint, delay_seconds float8,
        run_after timestamptz, deadline timestamptz, deadline_seconds float8, payload jsonb, max_attempts integer, exclusive_key text,
        pipeline_id uuid, parent_job_id uuid, round smallint, idempotency_key text, traceparent text)
),
queues AS (
    INSERT INTO batchwright.queue (name)
    SELECT DISTINCT queue FROM input WHERE NOT EXISTS (SELECT FROM batchwright.queue WHERE name = input.queue)
    ON CONFLICT DO NOTHING
),
inserted AS (
    INSERT INTO batchwright.job (
        id, job_type, queue, tenant, owner, priority, run_after, deadline, payload, max_attempts, exclusive_key,
        pipeline_id, parent_job_id, round, idempotency_key, traceparent, created_at)
    SELECT
        id, job_type, queue, tenant, owner, priority,
        greatest(:now, least(greatest(run_after, :now + make_interval(secs => delay_seconds)), last_moment)),
        last_moment, payload, max_attempts, exclusive_key,
        coalesce(pipeline_id, id), parent_job_id, round, idempotency_key, traceparent, :now
    FROM input
    ON CONFLICT DO NOTHING
    RETURNING id
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt)
    SELECT id, :now, 'job.enqueued', 'QUEUED', 0, 0 FROM inserted
)
SELECT id FROM inserted

-- name: find_enqueued
-- For jobs that were not inserted: their own row (a repeated insert), or the first job of their idempotency key.
SELECT input.id, job.id,
       job.job_type = input.job_type AND job.payload = input.payload AND job.queue = input.queue
           AND job.exclusive_key IS NOT DISTINCT FROM input.exclusive_key
FROM jsonb_to_recordset(%(jobs)s::jsonb) AS input (
    id uuid, job_type text, queue text, tenant text, payload jsonb, exclusive_key text, idempotency_key text)
JOIN batchwright.job ON job.id = input.id
    OR (job.tenant = input.tenant AND job.idempotency_key = input.idempotency_key)

-- name: lock_keys
SELECT pg_advisory_xact_lock(:key_number)
FROM (
    SELECT DISTINCT tenant, exclusive_key
    FROM unnest(%(tenants)s::text[], %(keys)s::text[]) AS wanted (tenant, exclusive_key)
    ORDER BY tenant, exclusive_key
) AS ordered

-- name: open_jobs_of_key
SELECT id, status::text, started_at IS NOT NULL
FROM batchwright.job
WHERE tenant = %(tenant)s AND exclusive_key = %(key)s AND finished_at IS NULL
ORDER BY is_current DESC, priority, run_after, id

-- part: startable
-- An ordinary claim may start the job, if its key is free.
job.status = 'QUEUED' AND job.run_after <= :now AND job.rescues < :deaths_max AND job.attempts < job.max_attempts
    AND job.job_type = ANY(%(job_types)s::text[])

-- part: key_is_held
-- The key is held by an open job, or by one that has ended but whose worker has not released it.
EXISTS (
    SELECT FROM batchwright.job AS holder
    WHERE holder.tenant = job.tenant AND holder.exclusive_key = job.exclusive_key
        AND holder.is_current AND holder.id <> job.id
        AND (holder.finished_at IS NULL OR holder.lease_until >= :now))

-- part: another_is_first
-- Of the jobs that wait for the key and that this worker could run, another one is next.
EXISTS (
    SELECT FROM batchwright.job AS rival
    WHERE rival.tenant = job.tenant AND rival.exclusive_key = job.exclusive_key
        AND rival.finished_at IS NULL AND rival.status = 'QUEUED'
        AND (rival.priority, rival.run_after, rival.id) < (job.priority, job.run_after, job.id)
        AND rival.run_after <= :now AND rival.rescues < :deaths_max AND rival.attempts < rival.max_attempts
        AND rival.job_type = ANY(%(job_types)s::text[])
        AND rival.queue = ANY(ARRAY(SELECT lane.queue FROM lane)))

-- part: jobs_of_lanes
-- Due jobs behind the watermark of each lane. A keyed job must be the next of its key, unless it holds the key itself.
SELECT due.place, due.id, due.tenant, due.exclusive_key, due.run_after, lane.queue, lane.quota, lane.turn
FROM lane
CROSS JOIN LATERAL (
    SELECT job.ctid AS place, job.id, job.tenant, job.exclusive_key, job.run_after
    FROM batchwright.job
    WHERE job.queue = lane.queue AND job.priority = lane.priority
        AND (job.run_after, job.id) > (lane.after_time, lane.after_id) AND :startable
        AND (job.exclusive_key IS NULL OR (
            %(keyed)s::boolean AND NOT :key_is_held AND (job.is_current OR NOT :another_is_first)))
    ORDER BY job.run_after, job.id
    LIMIT lane.quota
    FOR UPDATE SKIP LOCKED
) AS due
LIMIT %(slots)s

-- part: jobs_of_freed_keys
-- The next job of each key that this worker has just freed.
SELECT next.place, next.id, next.tenant, next.exclusive_key, next.run_after, next.queue, next.quota, 0
FROM unnest(%(freed_tenants)s::text[], %(freed_keys)s::text[]) AS freed (tenant, exclusive_key)
CROSS JOIN LATERAL (
    SELECT job.ctid AS place, job.id, job.tenant, job.exclusive_key, job.run_after, job.queue,
           (SELECT min(lane.quota) FROM lane WHERE lane.queue = job.queue) AS quota
    FROM batchwright.job
    WHERE job.tenant = freed.tenant AND job.exclusive_key = freed.exclusive_key AND job.finished_at IS NULL
        AND :startable AND job.queue IN (SELECT lane.queue FROM lane)
    ORDER BY job.priority, job.run_after, job.id
    LIMIT 1
    FOR UPDATE OF job SKIP LOCKED
) AS next

-- part: jobs_by_id
-- The jobs that the caller names; including suspects, if requested.
SELECT named.place, named.id, named.tenant, named.exclusive_key, named.run_after, named.queue, NULL, 0
FROM (
    SELECT job.ctid AS place, job.id, job.tenant, job.exclusive_key, job.run_after, job.queue
    FROM batchwright.job
    WHERE job.id = ANY(%(ids)s::uuid[]) AND job.status = 'QUEUED' AND job.run_after <= :now
        AND (job.rescues >= :deaths_max) = %(suspect)s::boolean AND job.attempts < job.max_attempts
        AND job.job_type = ANY(%(job_types)s::text[]) AND job.queue <> ALL (:paused_queues)
    FOR UPDATE SKIP LOCKED
) AS named

-- name: claim
-- Find due jobs in three ways, pick as many as slots and quotas allow, take their keys from jobs that have ended, and
-- start them. A job is found once: the lock keeps its row at the same place on disk until the update. A row that
-- changed between the search and the lock has moved; the update skips it, and the next scan finds it.
WITH lane AS MATERIALIZED (
    SELECT * FROM unnest(
        %(queues)s::text[], %(priorities)s::smallint[], %(quotas)s::integer[],
        %(after_times)s::timestamptz[], %(after_ids)s::uuid[])
        WITH ORDINALITY AS lane (queue, priority, quota, after_time, after_id, turn)
    WHERE queue <> ALL (:paused_queues)
),
found AS MATERIALIZED (
    (:jobs_of_lanes)
    UNION ALL
    :jobs_of_freed_keys
    UNION ALL
    :jobs_by_id
),
pick AS MATERIALIZED (
    SELECT job.place, job.id, job.tenant, job.exclusive_key
    FROM (
        SELECT found.*, row_number() OVER (PARTITION BY queue ORDER BY turn, run_after, id) AS number FROM found
    ) AS job
    WHERE (quota IS NULL OR number <= quota)
        AND (exclusive_key IS NULL OR (NOT :key_is_held AND pg_try_advisory_xact_lock(:key_number)))
    ORDER BY turn, run_after, id
    LIMIT %(slots)s
),
demoted AS (
    UPDATE batchwright.job SET is_current = false
    FROM pick
    WHERE pick.exclusive_key IS NOT NULL AND job.tenant = pick.tenant AND job.exclusive_key = pick.exclusive_key
        AND job.id <> pick.id AND :has_left_its_key
    RETURNING job.id
),
claimed AS (
    UPDATE batchwright.job
    SET status = 'RUNNING', locked_by = %(worker)s, locked_at = :now,
        lease_until = :now + make_interval(secs => %(lease_seconds)s),
        attempts = attempts + 1, claims = claims + 1,
        is_current = exclusive_key IS NOT NULL, started_at = coalesce(started_at, :now)
    WHERE job.ctid = ANY(ARRAY(SELECT place FROM pick)) AND job.status::text = 'QUEUED'
        AND (SELECT count(*) FROM demoted) >= 0
    RETURNING id, claims, job_type, queue, tenant, priority, payload, attempts, max_attempts, exclusive_key,
              pipeline_id, parent_job_id, deadline, deadline_passed, waits, traceparent, progress_current,
              progress_total, run_after, dead_claim
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker)
    SELECT id, :now, 'job.started', 'RUNNING', claims, attempts, %(worker)s FROM claimed
)
SELECT claimed.id, claims, job_type, queue, tenant, priority, payload::text, attempts, max_attempts, exclusive_key,
       nullif(pipeline_id, claimed.id), parent_job_id, deadline, deadline_passed, waits, traceparent, progress_current, progress_total,
       run_after, coalesce(dead_claim = claims - 1, false), clock.now
FROM (SELECT :now AS now) AS clock LEFT JOIN claimed ON true

-- name: suspects
-- Jobs whose worker died twice and that are due: each runs alone.
SELECT id FROM batchwright.job
WHERE status = 'QUEUED' AND rescues >= :deaths_max AND attempts < max_attempts
    AND run_after <= :now AND job_type = ANY(%(job_types)s::text[])
    AND queue <> ALL (:paused_queues)
    AND (left(queue, 1) <> :private_mark OR split_part(queue, '/', 1) = ANY(%(private)s::text[]))
ORDER BY run_after
LIMIT %(limit)s

-- name: unknown_types
-- Jobs that no worker can run stay in place while others are claimed. So it is enough to search the head of each queue
-- and priority, among a bounded number of jobs. Private queues wait for their own process only.
WITH RECURSIVE head AS (
    (SELECT job.queue, job.priority FROM batchwright.job AS job
     WHERE job.status = 'QUEUED'
     ORDER BY job.queue, job.priority, job.run_after, job.id
     LIMIT 1)
    UNION ALL
    SELECT next.queue, next.priority
    FROM head
    CROSS JOIN LATERAL (
        SELECT job.queue, job.priority FROM batchwright.job AS job
        WHERE job.status = 'QUEUED' AND (job.queue, job.priority) > (head.queue, head.priority)
        ORDER BY job.queue, job.priority, job.run_after, job.id
        LIMIT 1
    ) AS next
)
SELECT job_type, count(*) FROM (
    SELECT looked.job_type
    FROM head
    CROSS JOIN LATERAL (
        SELECT job.job_type FROM batchwright.job AS job
        WHERE job.queue = head.queue AND job.priority = head.priority AND job.status = 'QUEUED' AND job.run_after <= :now
        ORDER BY job.run_after, job.id
        LIMIT %(lane_max)s
    ) AS looked
    WHERE left(head.queue, 1) <> :private_mark
    LIMIT %(scan_max)s
) AS looked
WHERE job_type <> ALL (%(job_types)s::text[])
GROUP BY job_type ORDER BY job_type

-- name: holdings
SELECT id, claims, status::text FROM batchwright.job WHERE locked_by = %(worker)s

-- name: renew
-- Rows locked by others are skipped: they are being settled, cancelled or rescued.
WITH mine AS MATERIALIZED (
    SELECT job.id
    FROM batchwright.job
    JOIN unnest(%(ids)s::uuid[], %(claims)s::bigint[]) AS held (id, claim) ON job.id = held.id
    WHERE job.claims = held.claim AND :is_held
    ORDER BY job.id
    FOR NO KEY UPDATE OF job SKIP LOCKED
)
UPDATE batchwright.job SET lease_until = :now + make_interval(secs => %(lease_seconds)s)
WHERE id = ANY(ARRAY(SELECT id FROM mine))
RETURNING id

-- name: succeed
WITH settled AS (
    UPDATE batchwright.job
    SET status = 'SUCCEEDED', result = done.result, error = NULL, finished_at = :now,
        locked_by = NULL, lease_until = NULL, rescues = 0,
        progress_current = coalesce(done.progress_current, job.progress_current),
        progress_total = coalesce(done.progress_total, job.progress_total)
    FROM jsonb_to_recordset(%(settles)s::jsonb) AS done (
        id uuid, claim bigint, result jsonb, progress_current bigint, progress_total bigint)
    WHERE :settle_fence
    RETURNING job.id, job.claims, job.attempts, job.parent_job_id
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker)
    SELECT id, :now, 'job.succeeded', 'SUCCEEDED', claims, attempts, %(worker)s FROM settled
)
SELECT id, parent_job_id, false FROM settled

-- name: fail
WITH settled AS (
    UPDATE batchwright.job
    SET status = 'FAILED', error = done.error, finished_at = :now,
        locked_by = NULL, lease_until = NULL, rescues = 0
    FROM jsonb_to_recordset(%(settles)s::jsonb) AS done (id uuid, claim bigint, error jsonb)
    WHERE :settle_fence
    RETURNING job.id, job.claims, job.attempts, job.parent_job_id, job.error
),
events AS (
    INSERT INTO batchwright.job_event (
        job_id, ts, event, level, status, claim, attempt, worker, message, fields, error_kind)
    SELECT id, :now, 'job.failed', 'error', 'FAILED', claims, attempts, %(worker)s,
           error ->> 'message', error - 'message', error ->> 'kind'
    FROM settled
)
SELECT id, parent_job_id, true FROM settled

-- name: retry
WITH settled AS (
    UPDATE batchwright.job
    SET status = 'QUEUED', error = done.error, rescues = 0, locked_by = NULL, lease_until = NULL,
        run_after = :put_off
    FROM jsonb_to_recordset(%(settles)s::jsonb) AS done (
        id uuid, claim bigint, error jsonb, delay_seconds float8)
    WHERE :settle_fence
    RETURNING job.id, job.claims, job.attempts, job.error, done.delay_seconds
),
events AS (
    INSERT INTO batchwright.job_event (
        job_id, ts, event, level, status, claim, attempt, worker, message, fields, error_kind)
    SELECT id, :now, 'job.retried', 'warning', 'QUEUED', claims, attempts, %(worker)s, error ->> 'message',
           (error - 'message') || jsonb_build_object('delay_seconds', delay_seconds), error ->> 'kind'
    FROM settled
)
SELECT id, NULL::uuid, false FROM settled

-- name: snooze
WITH settled AS (
    UPDATE batchwright.job
    SET status = 'QUEUED', attempts = job.attempts - 1, rescues = 0, locked_by = NULL, lease_until = NULL,
        message = coalesce(done.reason, job.message),
        run_after = :put_off,
        progress_current = coalesce(done.progress_current, job.progress_current),
        progress_total = coalesce(done.progress_total, job.progress_total)
    FROM jsonb_to_recordset(%(settles)s::jsonb) AS done (
        id uuid, claim bigint, reason text, delay_seconds float8, error_kind text,
        progress_current bigint, progress_total bigint)
    WHERE :settle_fence
    RETURNING job.id, job.claims, job.attempts, done.reason, done.delay_seconds, done.error_kind
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, message, fields, error_kind)
    SELECT id, :now, 'job.retry_later', 'QUEUED', claims, attempts, %(worker)s, reason,
           jsonb_build_object('delay_seconds', delay_seconds), error_kind
    FROM settled
)
SELECT id, NULL::uuid, false FROM settled

-- name: release
-- Earlier deaths are kept: a worker that stops says nothing about the job.
WITH settled AS (
    UPDATE batchwright.job
    SET status = 'QUEUED', attempts = job.attempts - 1, locked_by = NULL, lease_until = NULL,
        run_after = :now
    FROM jsonb_to_recordset(%(settles)s::jsonb) AS done (id uuid, claim bigint, reason text)
    WHERE :settle_fence
    RETURNING job.id, job.claims, job.attempts, done.reason
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, message)
    SELECT id, :now, 'job.released', 'QUEUED', claims, attempts, %(worker)s, reason FROM settled
)
SELECT id, NULL::uuid, false FROM settled

-- name: wait
-- With no children the job joins at once.
WITH settled AS (
    UPDATE batchwright.job
    SET status = CASE WHEN %(children)s > 0 THEN 'RUNNING' WHEN %(on_join)s = 'close' THEN 'SUCCEEDED'
                      ELSE 'QUEUED' END::batchwright.job_status,
        finished_at = CASE WHEN %(children)s = 0 AND %(on_join)s = 'close' THEN :now END,
        run_after = CASE WHEN %(children)s = 0 AND %(on_join)s = 'resume' THEN :now ELSE run_after END,
        on_join = CASE WHEN %(children)s > 0 THEN %(on_join)s END,
        allow_failures = %(allow_failures)s::integer, waits = waits + 1,
        children_open = %(children)s, children_failed = 0,
        progress_current = CASE WHEN %(children)s > 0 THEN 0 ELSE progress_current END,
        progress_total = CASE WHEN %(children)s > 0 THEN %(children)s ELSE progress_total END,
        result = %(result)s::jsonb, error = NULL, attempts = attempts - 1, rescues = 0,
        locked_by = NULL, lease_until = NULL
    WHERE id = %(id)s AND claims = %(claim)s AND locked_by IS NOT DISTINCT FROM %(worker)s AND :is_held
    RETURNING id, claims, attempts, status, waits, parent_job_id, pipeline_id, deadline, tenant, priority
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, fields)
    SELECT id, :now, CASE WHEN %(children)s > 0 THEN 'job.waited' ELSE 'job.joined' END,
           status, claims, attempts, %(worker)s, jsonb_build_object('children', %(children)s::integer)
    FROM settled
)
SELECT id, parent_job_id, false, status::text, waits FROM settled

-- name: keys_of_ancestors
-- The exclusive keys of a job and of all jobs that wait for it.
WITH RECURSIVE line AS (
    SELECT id, parent_job_id, exclusive_key FROM batchwright.job WHERE id = %(id)s
    UNION ALL
    SELECT job.id, job.parent_job_id, job.exclusive_key
    FROM line JOIN batchwright.job ON job.id = line.parent_job_id
)
SELECT id, exclusive_key FROM line WHERE exclusive_key IS NOT NULL

-- name: join
-- Count children that ended, and close or resume each parent whose last child this was. The decision reads the
-- locked rows: the snapshot lacks a child that ended while this statement waited for the lock.
WITH ended AS (
    SELECT parent_job_id, count(*)::integer AS n, (count(*) FILTER (WHERE failed))::integer AS failed
    FROM unnest(%(parents)s::uuid[], %(failed)s::boolean[]) AS ended (parent_job_id, failed)
    GROUP BY parent_job_id
),
parent AS MATERIALIZED (
    SELECT job.id, ended.n, ended.failed, job.deadline, job.on_join, job.allow_failures, job.children_open,
           job.children_failed
    FROM batchwright.job JOIN ended ON job.id = ended.parent_job_id
    WHERE job.children_open > 0
    ORDER BY job.id
    FOR UPDATE OF job
),
verdict AS MATERIALIZED (
    SELECT id, n, failed,
           coalesce(deadline <= :now, false) AS overdue,
           CASE WHEN children_open > n THEN 'RUNNING'
                WHEN deadline <= :now AND on_join = 'resume' THEN 'QUEUED'
                WHEN deadline <= :now THEN 'FAILED'
                WHEN children_failed + failed > allow_failures THEN 'FAILED'
                WHEN on_join = 'close' THEN 'SUCCEEDED'
                ELSE 'QUEUED' END::batchwright.job_status AS status
    FROM parent
),
counted AS (
    UPDATE batchwright.job
    SET children_open = children_open - verdict.n, children_failed = children_failed + verdict.failed,
        progress_current = coalesce(progress_current, 0) + verdict.n,
        status = verdict.status,
        finished_at = CASE WHEN verdict.status IN ('SUCCEEDED', 'FAILED') THEN :now END,
        run_after = CASE WHEN verdict.status = 'QUEUED' THEN :now ELSE run_after END,
        deadline_passed = deadline_passed OR (verdict.status = 'QUEUED' AND verdict.overdue),
        on_join = CASE WHEN verdict.status IN ('RUNNING', 'FAILED') THEN on_join END,
        error = CASE
            WHEN verdict.status = 'FAILED' AND verdict.overdue THEN jsonb_build_object(
                'kind', 'deadline', 'code', 'deadline_exceeded', 'type', 'Deadline',
                'message', 'the deadline passed while the job waited for its children')
            WHEN verdict.status = 'FAILED' THEN jsonb_build_object(
                'kind', 'fatal', 'code', 'children_failed', 'type', 'ChildrenFailed',
                'message', format('%%s of %%s children did not succeed',
                                  children_failed + verdict.failed, progress_total))
            ELSE error END
    FROM verdict
    WHERE job.id = verdict.id
    RETURNING job.id, job.status, job.claims, job.attempts, job.parent_job_id, job.children_failed, job.error
),
moved AS (
    SELECT * FROM counted WHERE status <> 'RUNNING'
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, level, status, claim, attempt, message, fields, error_kind)
    SELECT id, :now, 'job.joined', CASE status WHEN 'FAILED' THEN 'error' ELSE 'info' END, status, claims, attempts,
           error ->> 'message', jsonb_build_object('children_failed', children_failed), error ->> 'kind'
    FROM moved
)
SELECT id, parent_job_id, status = 'FAILED', status::text FROM moved

-- name: cancel
-- Cancel the open jobs of whole subtrees. Children are locked before their parents.
WITH RECURSIVE tree AS (
    SELECT id, 0 AS depth FROM batchwright.job WHERE id = ANY(%(ids)s::uuid[])
    UNION ALL
    SELECT child.id, tree.depth + 1
    FROM tree JOIN batchwright.job AS child ON child.parent_job_id = tree.id
    WHERE child.finished_at IS NULL
),
open AS MATERIALIZED (
    SELECT job.id
    FROM batchwright.job JOIN (SELECT id, max(depth) AS depth FROM tree GROUP BY id) AS place ON place.id = job.id
    WHERE job.finished_at IS NULL
    ORDER BY place.depth DESC, job.id
    FOR UPDATE OF job
),
cancelled AS (
    UPDATE batchwright.job
    SET status = 'CANCELLED', finished_at = :now,
        children_failed = children_failed + children_open, children_open = 0,
        error = jsonb_build_object('kind', 'cancelled', 'code', 'cancelled', 'type', 'Cancelled',
                                   'message', %(reason)s::text)
    WHERE id = ANY(ARRAY(SELECT id FROM open)) AND finished_at IS NULL
    RETURNING id, parent_job_id, claims, attempts, locked_by
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, message)
    SELECT id, :now, 'job.cancelled', 'CANCELLED', claims, attempts, locked_by, %(reason)s FROM cancelled
)
SELECT id, parent_job_id FROM cancelled

-- name: wake
UPDATE batchwright.job SET run_after = :now
WHERE id = ANY(%(ids)s::uuid[]) AND status = 'QUEUED' AND run_after > :now
RETURNING id

-- The job got further than before, so it is not what killed its workers.
-- name: absolve
UPDATE batchwright.job SET rescues = 0
WHERE id = %(id)s AND claims = %(claim)s AND status = 'RUNNING' AND rescues > 0
RETURNING id

-- name: redirect
-- Give a job that no worker ever claimed another type, queue and payload, once: other workers will run it.
WITH queues AS (
    INSERT INTO batchwright.queue (name)
    SELECT %(queue)s WHERE NOT EXISTS (SELECT FROM batchwright.queue WHERE name = %(queue)s)
    ON CONFLICT DO NOTHING
),
moved AS (
    UPDATE batchwright.job SET job_type = %(job_type)s, queue = %(queue)s, payload = %(payload)s::jsonb
    WHERE id = %(id)s AND status = 'QUEUED' AND claims = 0 AND job_type <> %(job_type)s
    RETURNING id
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt)
    SELECT id, :now, 'job.redirected', 'QUEUED', 0, 0 FROM moved
)
SELECT id FROM moved

-- name: split
-- A held child keeps a part of its work; each of the other parts becomes a child of the same parent, which waits for it
-- too. The parent is written first, so that nothing happens if it no longer waits.
WITH held AS MATERIALIZED (
    SELECT job.* FROM batchwright.job
    WHERE job.id = %(id)s AND job.claims = %(claim)s AND job.locked_by IS NOT DISTINCT FROM %(worker)s::text AND :is_held
    FOR NO KEY UPDATE
),
parent AS (
    UPDATE batchwright.job
    SET children_open = job.children_open + cardinality(%(ids)s::uuid[]),
        progress_total = job.progress_total + cardinality(%(ids)s::uuid[])
    FROM held
    WHERE job.id = held.parent_job_id AND job.waits = held.round AND job.children_open > 0
    RETURNING job.id
),
kept AS (
    UPDATE batchwright.job SET payload = %(kept)s::jsonb
    FROM held, parent
    WHERE job.id = held.id
    RETURNING job.id, job.claims, job.attempts
),
given AS (
    INSERT INTO batchwright.job (
        id, job_type, queue, tenant, owner, priority, run_after, deadline, payload, max_attempts, pipeline_id,
        parent_job_id, round, traceparent, created_at)
    SELECT part.id, held.job_type, held.queue, held.tenant, held.owner, %(priority)s, :now, held.deadline, part.payload,
        held.max_attempts, held.pipeline_id, held.parent_job_id, held.round, held.traceparent, :now
    FROM held, parent, unnest(%(ids)s::uuid[], %(payloads)s::jsonb[]) AS part (id, payload)
    RETURNING id
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt, worker, fields)
    SELECT kept.id, :now, 'job.split', NULL::batchwright.job_status, kept.claims, kept.attempts, %(worker)s,
        jsonb_build_object('jobs', to_jsonb(%(ids)s::uuid[]))
    FROM kept
    UNION ALL
    SELECT given.id, :now, 'job.enqueued', 'QUEUED', 0, 0, NULL, NULL FROM given
)
SELECT id FROM given

-- name: shift_priority
UPDATE batchwright.job SET priority = least(9, greatest(0, priority + %(by)s))
WHERE id = ANY(%(ids)s::uuid[]) AND finished_at IS NULL AND %(by)s <> 0
RETURNING id

-- name: disown
-- The object that owned a job and its descendants is gone: retention may remove them. The object handled their
-- failures, so they do not appear in the inbox.
WITH RECURSIVE tree AS (
    (
        SELECT id FROM batchwright.job WHERE id = %(id)s
        UNION ALL
        SELECT id FROM batchwright.job WHERE pipeline_id = %(id)s AND parent_job_id IS NULL AND pipeline_id <> id
    )
    UNION ALL
    SELECT child.id FROM tree JOIN batchwright.job AS child ON child.parent_job_id = tree.id
)
UPDATE batchwright.job
SET owner = NULL, dismissed_at = CASE WHEN status = 'FAILED' THEN coalesce(dismissed_at, :now) ELSE dismissed_at END
WHERE id = ANY(ARRAY(SELECT id FROM tree)) AND owner = %(owner)s
RETURNING id

-- name: open_children
SELECT id FROM batchwright.job WHERE parent_job_id = ANY(%(ids)s::uuid[]) AND finished_at IS NULL

-- name: let_go
-- The operation of a job that was cancelled or expired has ended: its lease, and so its key, is free.
UPDATE batchwright.job SET locked_by = NULL, lease_until = NULL
FROM unnest(%(ids)s::uuid[], %(claims)s::bigint[]) AS held (id, claim)
WHERE job.id = held.id AND job.claims = held.claim AND job.finished_at IS NOT NULL AND job.lease_until IS NOT NULL
RETURNING job.id

-- name: expire
-- Queued jobs, and those that a worker holds; `overdue_parents` finds waiting parents.
WITH due AS MATERIALIZED (
    SELECT id FROM batchwright.job
    WHERE deadline IS NOT NULL AND finished_at IS NULL AND NOT deadline_passed AND deadline <= :now
        AND (status = 'QUEUED' OR lease_until IS NOT NULL)
    ORDER BY deadline
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
expired AS (
    UPDATE batchwright.job
    SET status = 'FAILED', finished_at = :now,
        error = jsonb_build_object('kind', 'deadline', 'code', 'deadline_exceeded', 'type', 'Deadline',
                                   'message', 'the deadline passed before the job ended')
    WHERE id = ANY(ARRAY(SELECT id FROM due)) AND finished_at IS NULL
    RETURNING id, parent_job_id, claims, attempts, locked_by
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, level, status, claim, attempt, worker, error_kind)
    SELECT id, :now, 'job.expired', 'error', 'FAILED', claims, attempts, locked_by, 'deadline' FROM expired
)
SELECT id, parent_job_id, true FROM expired

-- name: overdue_parents
SELECT id FROM batchwright.job
WHERE deadline IS NOT NULL AND finished_at IS NULL AND NOT deadline_passed AND deadline <= :now
    AND status = 'RUNNING' AND lease_until IS NULL
ORDER BY deadline
LIMIT %(limit)s

-- name: rescue
-- Expired leases: by the clock, but not during the first lease after the server started; or named by the worker whose
-- process for that job has died. A job that already ended only loses its lock. Deaths count towards isolation,
-- but not in a private queue: its worker runs no other jobs that need protection, and users kill it on purpose.
-- The server's start time is that of its helper processes: they start after a recovery, or after a backend crashed.
WITH ready AS MATERIALIZED (
    SELECT greatest(pg_postmaster_start_time(), max(backend_start)) AS at
    FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'autovacuum launcher')
),
dead AS MATERIALIZED (
    SELECT id, queue, locked_by, status, max_attempts, rescues FROM batchwright.job
    WHERE locked_by IS NOT NULL AND CASE WHEN cardinality(%(ids)s::uuid[]) > 0
        THEN (id, claims) IN (SELECT * FROM unnest(%(ids)s::uuid[], %(claims)s::bigint[]))
        ELSE lease_until < :now AND (SELECT at FROM ready) < :now - make_interval(secs => %(lease_seconds)s) END
    ORDER BY id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
verdict AS MATERIALIZED (
    SELECT id, locked_by AS worker, status = 'RUNNING' AS open, left(queue, 1) = :private_mark AS private,
           CASE WHEN status <> 'RUNNING' THEN status
                WHEN max_attempts = 1 OR rescues >= :deaths_max THEN 'FAILED'
                ELSE 'QUEUED' END::batchwright.job_status AS status
    FROM dead
),
rescued AS (
    UPDATE batchwright.job
    SET status = verdict.status, locked_by = NULL, lease_until = NULL,
        attempts = CASE WHEN verdict.status = 'QUEUED' THEN attempts - 1 ELSE attempts END,
        rescues = CASE WHEN verdict.open AND NOT verdict.private THEN rescues + 1 ELSE rescues END,
        dead_claim = CASE WHEN verdict.open THEN claims ELSE dead_claim END,
        run_after = CASE WHEN verdict.status = 'QUEUED'
            THEN greatest(:now, least(:now + make_interval(secs => random() * %(jitter_seconds)s), deadline))
            ELSE run_after END,
        finished_at = CASE WHEN verdict.open AND verdict.status = 'FAILED' THEN :now ELSE finished_at END,
        error = CASE
            WHEN NOT verdict.open OR verdict.status = 'QUEUED' THEN error
            WHEN rescues >= :deaths_max THEN jsonb_build_object(
                'kind', 'fatal', 'code', 'poison', 'type', 'Poison',
                'message', format('its worker died %%s times in a row with this job, the last time alone', rescues + 1))
            ELSE jsonb_build_object(
                'kind', 'fatal', 'code', 'abandoned', 'type', 'Abandoned',
                'message', 'its worker died and max_attempts = 1 allows one start only') END
    FROM verdict
    WHERE job.id = verdict.id
    RETURNING job.id, job.parent_job_id, job.claims, job.attempts, job.status, job.error, job.queue, job.run_after,
              verdict.worker, verdict.open
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, level, status, claim, attempt, worker, message, error_kind)
    SELECT id, :now, 'job.rescued', CASE status WHEN 'FAILED' THEN 'error' ELSE 'warning' END, status, claims,
           attempts, worker,
           CASE status WHEN 'FAILED' THEN error ->> 'message' ELSE 'the worker that held it has died' END,
           CASE status WHEN 'FAILED' THEN error ->> 'kind' END
    FROM rescued WHERE open
)
SELECT id, CASE WHEN open AND status = 'FAILED' THEN parent_job_id END, true, status::text, open,
       open AND status = 'FAILED' AND error ->> 'code' = 'poison', queue,
       CASE WHEN open AND status = 'QUEUED' THEN extract(epoch FROM run_after - :now)::float8 END
FROM rescued

-- name: forgive
-- The worker of these claims is alive after all: it only lost its lease, so this does not count as a death.
UPDATE batchwright.job SET rescues = greatest(0, rescues - 1), dead_claim = NULL
FROM unnest(%(ids)s::uuid[], %(claims)s::bigint[]) AS held (id, claim)
WHERE job.id = held.id AND job.dead_claim = held.claim AND job.finished_at IS NULL
RETURNING job.id

-- name: recover
WITH recovered AS (
    UPDATE batchwright.job
    SET status = 'QUEUED', locked_by = NULL, locked_at = NULL, lease_until = NULL,
        attempts = 0, rescues = 0, run_after = :now
    WHERE id = %(id)s AND status = 'RUNNING' AND lease_until IS NOT NULL
        AND (lease_until < :now OR locked_at < :now - make_interval(secs => %(stale_seconds)s))
    RETURNING id, claims
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, level, status, claim, attempt)
    SELECT id, :now, 'job.recovered', 'warning', 'QUEUED', claims, 0 FROM recovered
)
SELECT id FROM recovered

-- name: owners
SELECT id, owner FROM batchwright.job WHERE id = ANY(%(ids)s::uuid[]) AND tenant = coalesce(%(tenant)s, tenant)

-- name: lock_job
SELECT job.status::text, job.owner, job.lease_until IS NOT NULL AND job.lease_until >= :now, job.on_join IS NOT NULL,
       job.waits, job.round, job.locked_by, job.locked_at, parent.id, parent.status::text,
       parent.children_open > 0 AND parent.waits = job.round
FROM batchwright.job
LEFT JOIN batchwright.job AS parent ON parent.id = job.parent_job_id
WHERE job.id = %(id)s AND job.tenant = coalesce(%(tenant)s, job.tenant)
FOR UPDATE OF job

-- name: unsuccessful_children
SELECT id FROM batchwright.job
WHERE parent_job_id = %(id)s AND round = %(round)s AND status IN ('FAILED', 'CANCELLED')
ORDER BY id

-- name: rerun
-- If it has unsuccessful children (`children` is their number), the job waits for their rerun; otherwise it runs again.
WITH demoted AS (
    UPDATE batchwright.job SET is_current = false
    FROM batchwright.job AS waiting
    WHERE %(children)s > 0 AND waiting.id = %(id)s AND job.tenant = waiting.tenant
        AND job.exclusive_key = waiting.exclusive_key AND job.id <> waiting.id AND :has_left_its_key
    RETURNING job.id
),
rerun AS (
    UPDATE batchwright.job
    SET status = CASE WHEN %(children)s > 0 THEN 'RUNNING' ELSE 'QUEUED' END::batchwright.job_status,
        children_open = %(children)s, children_failed = 0,
        progress_current = CASE WHEN %(children)s > 0 THEN progress_total - %(children)s END,
        progress_total = CASE WHEN %(children)s > 0 THEN progress_total END,
        deadline = CASE WHEN deadline <= :now THEN NULL ELSE deadline END,
        deadline_passed = false, on_join = CASE WHEN %(children)s > 0 THEN on_join END,
        attempts = 0, rescues = 0, error = NULL, finished_at = NULL, dismissed_at = NULL,
        locked_by = NULL, lease_until = NULL,
        is_current = is_current OR (%(children)s > 0 AND exclusive_key IS NOT NULL),
        run_after = :now
    WHERE id = %(id)s AND status IN ('FAILED', 'CANCELLED') AND (SELECT count(*) FROM demoted) >= 0
    RETURNING id, status, claims, attempts
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt)
    SELECT id, :now, 'job.rerun', status, claims, attempts FROM rerun
)
SELECT id FROM rerun

-- name: dismiss
-- Remove the job from the inbox; its status does not change.
WITH dismissed AS (
    UPDATE batchwright.job SET dismissed_at = :now
    WHERE id = ANY(%(ids)s::uuid[]) AND status::text = 'FAILED' AND dismissed_at IS NULL
    RETURNING id, claims, attempts
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, claim, attempt)
    SELECT id, :now, 'job.dismissed', claims, attempts FROM dismissed
)
SELECT id FROM dismissed

-- name: uncount
-- A child that had ended is open again; its parent waits for one more.
UPDATE batchwright.job
SET children_open = children_open + 1, children_failed = children_failed - 1,
    progress_current = progress_current - 1
WHERE id = %(id)s AND children_open > 0 AND waits = %(round)s
RETURNING id

-- name: emit
-- Under the row lock of each job, so that event ids grow in commit order within a job.
WITH input AS (
    SELECT * FROM jsonb_to_recordset(%(events)s::jsonb) AS input (
        id uuid, claim bigint, place integer, event text, level text, message text, fields jsonb, worker text,
        model text, prompt_tokens bigint, completion_tokens bigint, cost numeric, error_kind text)
),
noted AS (
    UPDATE batchwright.job SET message = coalesce(latest.message, job.message)
    FROM (
        SELECT id, claim, (array_agg(message ORDER BY place DESC) FILTER (WHERE message IS NOT NULL))[1] AS message
        FROM input GROUP BY id, claim ORDER BY id
    ) AS latest
    WHERE job.id = latest.id AND job.claims = latest.claim AND :is_held
    RETURNING job.id, job.claims, job.attempts
),
written AS (
    INSERT INTO batchwright.job_event (
        job_id, ts, event, level, claim, attempt, worker, message, fields,
        model, prompt_tokens, completion_tokens, cost, error_kind)
    SELECT input.id, :now, input.event, input.level, noted.claims, noted.attempts, input.worker, input.message,
           input.fields, input.model, input.prompt_tokens, input.completion_tokens, input.cost, input.error_kind
    FROM input JOIN noted ON noted.id = input.id AND noted.claims = input.claim
    ORDER BY input.place
)
SELECT id FROM noted

-- name: progress
UPDATE batchwright.job
SET progress_current = coalesce(step.current, job.progress_current),
    progress_total = coalesce(step.total, job.progress_total),
    rescues = CASE WHEN step.current > coalesce(job.progress_current, 0) THEN 0 ELSE job.rescues END
FROM unnest(%(ids)s::uuid[], %(claims)s::bigint[], %(currents)s::bigint[], %(totals)s::bigint[])
    AS step (id, claim, current, total)
WHERE job.id = step.id AND job.claims = step.claim AND :is_held
RETURNING job.id

-- name: get
SELECT id, job_type, queue, tenant, owner, status::text, priority, run_after, deadline, payload, result, error,
       attempts, max_attempts, rescues, claims, locked_by, locked_at, lease_until, exclusive_key, is_current,
       pipeline_id, parent_job_id, round, waits, children_open, children_failed, progress_current, progress_total,
       message, idempotency_key, traceparent, created_at, started_at, finished_at, dismissed_at
FROM batchwright.job
WHERE id = ANY(%(ids)s::uuid[]) AND tenant = coalesce(%(tenant)s, tenant)

-- name: next_due
-- The next time at which a job of these types becomes due.
SELECT min(run_after) FROM batchwright.job
WHERE status = 'QUEUED' AND run_after > :now AND job_type = ANY(%(job_types)s::text[])

-- name: outcome
SELECT status::text, result, error FROM batchwright.job WHERE id = %(id)s

-- name: count_children
SELECT status::text, count(*) FROM (
    SELECT status FROM batchwright.job WHERE parent_job_id = %(id)s LIMIT %(count_max)s
) AS bounded
GROUP BY status

-- name: joined
SELECT count(*), count(*) FILTER (WHERE status = 'SUCCEEDED'), count(*) FILTER (WHERE status = 'FAILED'),
       count(*) FILTER (WHERE status = 'CANCELLED')
FROM batchwright.job WHERE parent_job_id = %(id)s AND round = %(round)s

-- name: children_after
SELECT id, job_type, status::text, payload, result, error FROM batchwright.job
WHERE parent_job_id = %(id)s AND round = %(round)s AND id > %(after)s
ORDER BY id
LIMIT %(limit)s

-- name: events
SELECT :event_columns
FROM batchwright.job_event
WHERE job_id = %(id)s AND id > %(after)s
ORDER BY id
LIMIT %(limit)s

-- name: events_of_many
SELECT :event_columns
FROM batchwright.job_event
WHERE job_id = ANY(%(ids)s) AND id > %(after)s
ORDER BY id
LIMIT %(limit)s

-- name: latest_events
SELECT :event_columns
FROM batchwright.job_event
WHERE job_id = %(id)s
ORDER BY id DESC
LIMIT %(limit)s
