-- Documents of runs: every move is a compare-and-set, which also counts it in its run.

-- part: item_columns
item.id, item.run_id, item.tenant, item.collection_id, item.document_id, item.source, item.name, item.etag, item.size,
item.metadata, item.status::text, item.step, item.generation, item.retry_count, item.last_error_kind, item.last_error,
item.cause, item.job_ids, item.prompt_tokens, item.completion_tokens, item.cost, item.created_at, item.ended_at,
item.dismissed_at

-- part: last_job
item.job_ids[cardinality(item.job_ids)]

-- A later run has come to an end with the same document, and what it found counts.
-- part: is_superseded
EXISTS (
    SELECT FROM batchwright.ingest_item AS newer
    WHERE newer.document_id = item.document_id AND newer.id > item.id AND newer.status IN ('DONE', 'UNCHANGED', 'FAILED'))

-- Open items whose job was never enqueued.
-- name: jobless
SELECT item.id, :last_job
FROM batchwright.ingest_item AS item
LEFT JOIN :jobs AS job ON job.id = :last_job
WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND job.id IS NULL
ORDER BY item.id
LIMIT %(limit)s

-- name: count_open
SELECT count(*) FROM (
    SELECT FROM batchwright.ingest_item WHERE run_id = %(run_id)s AND status = 'OPEN' LIMIT %(limit)s
) AS found

-- Items -------------------------------------------------------------------------------------------------------------

-- name: get
SELECT :item_columns FROM batchwright.ingest_item AS item
WHERE item.id = %(id)s AND item.tenant = coalesce(%(tenant)s, item.tenant)

-- name: list
-- Of each status the first ones, along the index of both.
SELECT :item_columns FROM batchwright.ingest_item AS item
WHERE item.id = ANY(ARRAY(
    SELECT first.id
    FROM unnest(%(statuses)s::text[]) AS wanted (status)
    CROSS JOIN LATERAL (
        SELECT one.id FROM batchwright.ingest_item AS one
        WHERE one.run_id = %(run_id)s AND one.status = wanted.status::batchwright.item_status
            AND one.id > coalesce(%(after)s, '') COLLATE "C"
            AND (%(step)s::text IS NULL OR one.step = %(step)s)
            AND (%(cause)s::text IS NULL OR one.cause = %(cause)s)
        ORDER BY one.run_id, one.status, one.id
        LIMIT %(limit)s
    ) AS first
    ORDER BY first.id
    LIMIT %(limit)s))
ORDER BY item.id

-- name: complete
WITH moved AS (
    UPDATE batchwright.ingest_item SET status = 'DONE', step = 'DONE', ended_at = :now, last_error_kind = '',
        last_error = NULL, cause = NULL, retry_count = 0
    WHERE id = %(id)s AND status = 'OPEN'
    RETURNING run_id, status
)
UPDATE batchwright.ingest_run AS run SET item_count_done = item_count_done + 1
FROM moved WHERE run.id = moved.run_id
RETURNING moved.status::text

-- name: skip
WITH moved AS (
    UPDATE batchwright.ingest_item SET status = 'UNCHANGED', step = 'DONE', ended_at = :now, last_error_kind = '',
        last_error = NULL, cause = NULL, retry_count = 0
    WHERE id = %(id)s AND status = 'OPEN'
    RETURNING run_id, status
)
UPDATE batchwright.ingest_run AS run SET item_count_unchanged = item_count_unchanged + 1
FROM moved WHERE run.id = moved.run_id
RETURNING moved.status::text

-- name: fail
WITH moved AS (
    UPDATE batchwright.ingest_item SET status = 'FAILED', step = 'FAILED', ended_at = :now,
        last_error_kind = %(error_kind)s, last_error = %(error)s::jsonb, cause = %(cause)s
    WHERE id = %(id)s AND status = 'OPEN'
    RETURNING run_id, status
)
UPDATE batchwright.ingest_run AS run SET item_count_failed = item_count_failed + 1
FROM moved WHERE run.id = moved.run_id
RETURNING moved.status::text

-- All open items of a run, which is being cancelled.
-- name: cancel
WITH moved AS (
    UPDATE batchwright.ingest_item SET status = 'CANCELLED', ended_at = :now
    WHERE run_id = %(run_id)s AND status = 'OPEN'
    RETURNING status
)
UPDATE batchwright.ingest_run AS run SET item_count_cancelled = item_count_cancelled + (SELECT count(*) FROM moved)
WHERE run.id = %(run_id)s
RETURNING (SELECT count(*) FROM moved)

-- Failed and cancelled items are open again, from the step that they had reached; what was done is kept.
-- name: retry
WITH wanted AS (
    SELECT item.id, item.status FROM batchwright.ingest_item AS item
    WHERE item.run_id = %(run_id)s AND item.status IN ('FAILED', 'CANCELLED')
        AND (%(ids)s::text[] IS NULL OR item.id = ANY(%(ids)s))
        AND (%(cause)s::text IS NULL OR item.cause = %(cause)s)
        AND NOT (%(only_inbox)s AND (item.status <> 'FAILED' OR item.dismissed_at IS NOT NULL))
        AND NOT (%(only_latest)s AND :is_superseded)
    ORDER BY item.id
    LIMIT %(limit)s
    FOR NO KEY UPDATE
),
reset AS (
    UPDATE batchwright.ingest_step AS step SET retry_count = 0, not_before = NULL, waiting = NULL
    FROM wanted JOIN batchwright.ingest_item AS item ON item.id = wanted.id
    WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'open'
),
moved AS (
    UPDATE batchwright.ingest_item AS item SET status = 'OPEN', ended_at = NULL, dismissed_at = NULL, retry_count = 0,
        generation = item.generation + %(anew)s::integer, job_ids = item.job_ids || gen_random_uuid(),
        step = CASE WHEN %(anew)s::integer > 0 THEN 'ENQUEUED' ELSE coalesce((
            SELECT step.step FROM batchwright.ingest_step AS step
            WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'done'
            ORDER BY step.ended_at DESC LIMIT 1), 'ENQUEUED') END
    FROM wanted
    WHERE item.id = wanted.id
    RETURNING item.id, :last_job AS job_id, wanted.status AS status_before
),
counted AS (
    UPDATE batchwright.ingest_run SET
        item_count_failed = item_count_failed - (SELECT count(*) FROM moved WHERE status_before = 'FAILED'),
        item_count_cancelled = item_count_cancelled - (SELECT count(*) FROM moved WHERE status_before = 'CANCELLED')
    WHERE id = %(run_id)s
)
SELECT id, job_id FROM moved ORDER BY id

-- name: open_jobs
SELECT item.id, job.id
FROM batchwright.ingest_item AS item
JOIN :jobs AS job ON job.id = :last_job AND job.is_open
WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND item.id > %(after)s COLLATE "C"
ORDER BY item.id
LIMIT %(limit)s

-- Whoever parked the run has put its steps off; they may go on.
-- name: clear_waits
UPDATE batchwright.ingest_step AS step SET not_before = NULL, waiting = NULL
FROM batchwright.ingest_item AS item
WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND step.item_id = item.id
    AND step.generation = item.generation AND step.state = 'open'
    AND step.waiting ->> 'for' IN ('user', 'budget', 'credential')
RETURNING step.item_id

-- The inbox ---------------------------------------------------------------------------------------------------------

-- name: inbox
-- At most `count_max` are counted.
SELECT item.cause, item.last_error ->> 'step', item.last_error_kind, item.last_error ->> 'code', count(*),
       min(item.ended_at), max(item.ended_at),
       (array_agg(item.id ORDER BY item.ended_at DESC))[1:3],
       (array_agg(item.name ORDER BY item.ended_at DESC))[1:3],
       (array_agg(item.last_error ->> 'message' ORDER BY item.ended_at DESC))[1],
       (array_agg(:last_job ORDER BY item.ended_at DESC))[1:3]
FROM (
    SELECT item.* FROM batchwright.ingest_item AS item
    WHERE item.status = 'FAILED' AND item.dismissed_at IS NULL AND item.tenant = coalesce(%(tenant)s, item.tenant)
        AND CASE WHEN %(run_id)s::text IS NULL THEN NOT :is_superseded ELSE item.run_id = %(run_id)s END
    LIMIT %(count_max)s
) AS item
GROUP BY 1, 2, 3, 4
ORDER BY 5 DESC, 1
LIMIT %(limit)s

-- name: dismiss
UPDATE batchwright.ingest_item SET dismissed_at = :now
WHERE status = 'FAILED' AND dismissed_at IS NULL AND tenant = coalesce(%(tenant)s, tenant)
    AND (%(run_id)s::text IS NULL OR run_id = %(run_id)s)
    AND (%(ids)s::text[] IS NULL OR id = ANY(%(ids)s))
    AND (%(cause)s::text IS NULL OR cause = %(cause)s)
RETURNING id

-- Runs with failed items that a retry over several runs would touch.
-- name: runs_with_failures
SELECT DISTINCT item.run_id FROM batchwright.ingest_item AS item
WHERE item.status = 'FAILED' AND item.dismissed_at IS NULL AND item.tenant = coalesce(%(tenant)s, item.tenant)
    AND (%(ids)s::text[] IS NULL OR item.id = ANY(%(ids)s))
    AND (%(cause)s::text IS NULL OR item.cause = %(cause)s)
    AND NOT (%(only_latest)s AND :is_superseded)
ORDER BY 1
LIMIT %(limit)s

-- Watching ----------------------------------------------------------------------------------------------------------

-- name: funnel
SELECT item.status::text, item.step, count(*) FROM batchwright.ingest_item AS item
WHERE item.run_id = %(run_id)s
GROUP BY 1, 2

-- name: steps
SELECT step.step, step.state, step.is_reused, step.starts, step.retry_count, step.error_kind, step.not_before,
       step.waiting, step.started_at, step.ended_at, step.output
FROM batchwright.ingest_step AS step
JOIN batchwright.ingest_item AS item ON item.id = step.item_id AND item.generation = step.generation
WHERE step.item_id = %(id)s

-- name: waits
SELECT step.waiting ->> 'for', step.waiting ->> 'message', count(*), min(step.not_before)
FROM batchwright.ingest_step AS step
JOIN batchwright.ingest_item AS item ON item.id = step.item_id AND item.generation = step.generation
WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND step.state = 'open' AND step.waiting IS NOT NULL
GROUP BY 1, 2
ORDER BY 3 DESC
LIMIT %(limit)s

-- Upkeep ------------------------------------------------------------------------------------------------------------

-- Open items whose job has ended without ending them.
-- name: abandoned
SELECT item.id, job.status
FROM batchwright.ingest_run AS run
JOIN batchwright.ingest_item AS item ON item.run_id = run.id AND item.status = 'OPEN'
JOIN :jobs AS job ON job.id = :last_job AND NOT job.is_open
WHERE run.ended_at IS NULL
ORDER BY item.id
LIMIT %(limit)s

-- Items that a parked run has put off, and that were settled only after its resumption had woken the others.
-- name: wake_late
WITH late AS (
    SELECT item.id, item.generation, job.id AS job_id
    FROM batchwright.ingest_run AS run
    JOIN batchwright.ingest_item AS item ON item.run_id = run.id AND item.status = 'OPEN'
    JOIN :jobs AS job ON job.id = :last_job AND job.status = 'QUEUED' AND job.run_after > :now
    CROSS JOIN LATERAL (
        SELECT count(*) AS waits, count(*) FILTER (WHERE step.waiting ->> 'for' IN ('user', 'credential', 'budget')) AS parked
        FROM batchwright.ingest_step AS step
        WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'open' AND step.waiting IS NOT NULL
    ) AS found
    WHERE run.ended_at IS NULL AND run.status = 'RUNNING' AND (found.waits = 0 OR found.parked > 0)
        AND run.resumed_at > :now - make_interval(secs => %(seconds)s::float8)
    ORDER BY item.id
    LIMIT %(limit)s
),
cleared AS (
    UPDATE batchwright.ingest_step AS step SET not_before = NULL, waiting = NULL
    FROM late
    WHERE step.item_id = late.id AND step.generation = late.generation AND step.state = 'open'
        AND step.waiting ->> 'for' IN ('user', 'credential', 'budget')
)
SELECT job_id FROM late
