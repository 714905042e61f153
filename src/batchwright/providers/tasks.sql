-- Tasks: every transition is a compare-and-set; a request to cancel is a column that the worker of the task reads.

-- part: columns
id, tenant, status::text, task_type, provider, targets, inputs, invalid_urls, options, metadata, job_id, queue, priority,
traceparent, provider_state, error, succeeded, failed, input_tokens, output_tokens, audio_seconds, cost, result_file_id,
result_expires_seconds, cancel_note,
CASE WHEN ended_at IS NULL AND waiting_at > :now - make_interval(secs => 900) THEN waiting_message END,
created_at, in_progress_at, cancel_requested_at, deadline_at, ended_at,
extract(epoch FROM deadline_at - :now)::float8

-- The columns that are set when a task ends.
-- part: ending
provider_state = coalesce(%(provider_state)s::jsonb, provider_state),
error = %(error)s::jsonb,
succeeded = %(succeeded)s,
failed = %(failed)s,
input_tokens = %(input_tokens)s,
output_tokens = %(output_tokens)s,
audio_seconds = %(audio_seconds)s,
cost = %(cost)s,
result_file_id = %(result_file_id)s,
ended_at = :now

-- name: insert
INSERT INTO batchwright.task (
    id, tenant, task_type, provider, targets, inputs, invalid_urls, options, metadata, job_id, queue, priority,
    traceparent, idempotency_key, idempotency_digest, result_expires_seconds, created_at, deadline_at)
VALUES (
    %(id)s, %(tenant)s, %(task_type)s, %(provider)s, %(targets)s::jsonb, %(inputs)s::jsonb, %(invalid_urls)s::text[],
    %(options)s::jsonb, %(metadata)s::jsonb, %(job_id)s, %(queue)s, %(priority)s, %(traceparent)s, %(idempotency_key)s,
    %(idempotency_digest)s, %(result_expires_seconds)s, :now, :now + make_interval(secs => %(timeout_seconds)s))
ON CONFLICT DO NOTHING
RETURNING :columns

-- name: use_files
INSERT INTO batchwright.file_use (file_id, owner)
SELECT unnest(%(file_ids)s::text[]), %(id)s
ON CONFLICT DO NOTHING
RETURNING file_id

-- name: release_files
DELETE FROM batchwright.file_use WHERE owner = %(id)s RETURNING file_id

-- The conflicting task: the same one, created by a call whose answer was lost, or the one that has the key.
-- name: known
SELECT idempotency_digest, :columns
FROM batchwright.task
WHERE id = %(id)s OR (tenant = %(tenant)s AND idempotency_key = %(idempotency_key)s)
ORDER BY id <> %(id)s
LIMIT 1

-- name: get
SELECT :columns FROM batchwright.task WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant)

-- By tenant and id, written so that only the index on both fits.
-- name: list
SELECT :columns
FROM batchwright.task
WHERE (tenant, id) < (%(tenant)s, coalesce(%(after)s, 'u')) AND tenant >= %(tenant)s
ORDER BY tenant DESC, id DESC
LIMIT %(limit)s

-- name: list_everywhere
SELECT :columns
FROM batchwright.task
WHERE id < coalesce(%(after)s, 'u') COLLATE "C"
ORDER BY id DESC
LIMIT %(limit)s

-- By status, the newest of each status and tenant: `list` would scan all others to find a few. Written so that only
-- the index on all three fits.
-- name: list_by_status
WITH RECURSIVE known AS (
    (SELECT one.tenant FROM batchwright.task AS one WHERE %(tenant)s::text IS NULL ORDER BY one.tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT next.tenant FROM batchwright.task AS next WHERE next.tenant > known.tenant ORDER BY next.tenant LIMIT 1)
    FROM known WHERE known.tenant IS NOT NULL
),
wanted AS (
    SELECT whose.tenant, status::batchwright.task_status AS status
    FROM (SELECT tenant FROM known UNION ALL SELECT %(tenant)s::text) AS whose, unnest(%(statuses)s::text[]) AS status
    WHERE whose.tenant IS NOT NULL
)
SELECT :columns
FROM batchwright.task
WHERE id = ANY(ARRAY(
    SELECT newest.id
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT one.id FROM batchwright.task AS one
        WHERE (one.tenant, one.status, one.id) < (wanted.tenant, wanted.status, coalesce(%(after)s, 'u'))
            AND (one.tenant, one.status) >= (wanted.tenant, wanted.status)
        ORDER BY one.tenant DESC, one.status DESC, one.id DESC
        LIMIT %(limit)s
    ) AS newest
    ORDER BY newest.id DESC
    LIMIT %(limit)s))
ORDER BY id DESC

-- name: request_cancel
UPDATE batchwright.task SET cancel_requested_at = coalesce(cancel_requested_at, :now)
WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant) AND ended_at IS NULL
RETURNING :columns

-- name: begin
UPDATE batchwright.task SET status = 'IN_PROGRESS', provider_state = %(provider_state)s::jsonb, in_progress_at = :now
WHERE id = %(id)s AND status = 'PENDING'
RETURNING :columns

-- The outcome of a round. The message is null if the task waits for nothing.
-- name: save
UPDATE batchwright.task SET
    provider_state = coalesce(%(provider_state)s::jsonb, provider_state),
    cancel_note = coalesce(%(cancel_note)s, cancel_note),
    waiting_message = %(waiting_message)s,
    waiting_at = CASE WHEN %(waiting_message)s::text IS NOT NULL THEN :now END
WHERE id = %(id)s AND ended_at IS NULL
RETURNING id

-- name: complete
UPDATE batchwright.task SET status = 'COMPLETED', :ending
WHERE id = %(id)s AND status = 'IN_PROGRESS'
RETURNING status::text

-- name: complete_in_part
UPDATE batchwright.task SET status = 'PARTIAL_COMPLETE', :ending
WHERE id = %(id)s AND status = 'IN_PROGRESS'
RETURNING status::text

-- name: fail
UPDATE batchwright.task SET status = 'FAILED', :ending
WHERE id = %(id)s AND status IN ('PENDING', 'IN_PROGRESS')
RETURNING status::text

-- name: end_cancelled
UPDATE batchwright.task SET status = 'CANCELLED', :ending
WHERE id = %(id)s AND status IN ('PENDING', 'IN_PROGRESS')
RETURNING status::text

-- Open tasks whose job has ended without ending them, and tasks that no worker has picked up ten minutes after their
-- timeout.
-- name: abandoned
SELECT task.id, task.tenant, task.job_id, job.status
FROM batchwright.task
LEFT JOIN :jobs AS job ON job.id = task.job_id
WHERE task.ended_at IS NULL AND (
    job.id IS NULL OR NOT job.is_open
    OR (task.status = 'PENDING' AND job.status = 'QUEUED' AND task.deadline_at < :now - make_interval(mins => 10)))
ORDER BY task.deadline_at, task.id
LIMIT %(limit)s

-- A page of waiting tasks, and whether they may wait for the credential of this provider.
-- name: parked
SELECT tenant, id, job_id, targets @> %(target)s::jsonb
FROM batchwright.task
WHERE ended_at IS NULL AND waiting_message IS NOT NULL AND (tenant, id) > (%(after_tenant)s::text, %(after)s::text)
ORDER BY tenant, id
LIMIT %(limit)s

-- Tasks that were just cancelled: their jobs may have been about to snooze.
-- name: just_cancelled
SELECT job_id FROM batchwright.task
WHERE ended_at IS NULL AND cancel_requested_at > :now - make_interval(secs => 30)
ORDER BY cancel_requested_at
LIMIT %(limit)s

-- Reads up to `count_max` waiting tasks. If there are more, a provider whose credential is refused is always named:
-- the tasks that were not read may wait for it.
-- name: count_parked
WITH waiting AS MATERIALIZED (
    (
        SELECT id, job_id, waiting_at, targets FROM batchwright.task
        WHERE ended_at IS NULL AND waiting_message IS NOT NULL AND tenant = %(tenant)s
        ORDER BY tenant DESC, id DESC
        LIMIT %(count_max)s + 1
    )
    UNION ALL
    (
        SELECT id, job_id, waiting_at, targets FROM batchwright.task
        WHERE ended_at IS NULL AND waiting_message IS NOT NULL AND %(tenant)s::text IS NULL
        ORDER BY tenant DESC, id DESC
        LIMIT %(count_max)s + 1
    )
),
looked_at AS MATERIALIZED (
    SELECT count(*) > %(count_max)s AS has_more FROM waiting
)
SELECT hold.provider, hold.code, hold.message, hold.since, parked.n, parked.last_at, parked.latest, looked_at.has_more
FROM batchwright.provider_hold AS hold
CROSS JOIN looked_at
CROSS JOIN LATERAL (
    SELECT count(*) AS n, max(waiting.waiting_at) AS last_at,
        coalesce((array_agg(waiting.job_id ORDER BY waiting.id DESC))[1:3], '{}') AS latest
    FROM waiting
    WHERE waiting.targets @> jsonb_build_array(jsonb_build_object('provider', hold.provider))
) AS parked
WHERE (parked.n > 0 OR looked_at.has_more) AND hold.released_at IS NULL
ORDER BY hold.since, hold.provider

-- name: old
SELECT id, job_id FROM batchwright.task
WHERE ended_at < :now - make_interval(secs => %(keep_seconds)s::float8)
ORDER BY ended_at, id
LIMIT %(limit)s

-- name: remove
WITH jobs AS (DELETE FROM batchwright.provider_job WHERE owner = %(id)s)
DELETE FROM batchwright.task WHERE id = %(id)s AND ended_at IS NOT NULL RETURNING id

-- name: keys
SELECT tenant, idempotency_key, id, created_at < :now - make_interval(secs => %(keep_seconds)s::float8)
FROM batchwright.task
WHERE idempotency_key IS NOT NULL AND (tenant, idempotency_key) > (%(after)s::text, %(after_id)s::text)
ORDER BY tenant, idempotency_key
LIMIT %(limit)s

-- name: clear_keys
UPDATE batchwright.task SET idempotency_key = NULL, idempotency_digest = NULL
WHERE id = ANY(%(ids)s) AND idempotency_key IS NOT NULL
RETURNING id
