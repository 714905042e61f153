-- Documents of runs: every transition is a compare-and-set that also updates the run's counts.

-- part: item_columns
item.id, item.run_id, item.tenant, item.collection_id, item.document_id, item.source, item.name, item.etag, item.size,
item.metadata, item.status::text, item.step, item.generation, item.retry_count, item.last_error_kind, item.last_error,
item.cause, item.job_ids, item.prompt_tokens, item.completion_tokens, item.cost, item.created_at, item.ended_at,
item.dismissed_at

-- part: last_job
item.job_ids[cardinality(item.job_ids)]

-- A later run has finished the same document, and its result counts.
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
-- The first items of each status, along the index of run and status. Step and cause are not in the index, so `scan_max`
-- items of each status are examined. After the first place where that was not enough, items may be missing: the page
-- ends there, and every row contains that place.
WITH looked_at AS MATERIALIZED (
    SELECT wanted.status, first.id, first.step, first.cause
    FROM unnest(%(statuses)s::text[]) AS wanted (status)
    CROSS JOIN LATERAL (
        SELECT one.id, one.step, one.cause FROM batchwright.ingest_item AS one
        WHERE one.run_id = %(run_id)s AND one.status = wanted.status::batchwright.item_status
            AND one.id > coalesce(%(after)s, '') COLLATE "C"
        ORDER BY one.run_id, one.status, one.id
        LIMIT %(scan_max)s
    ) AS first
),
stop AS MATERIALIZED (
    SELECT min(id) AS id
    FROM (SELECT max(id) AS id FROM looked_at GROUP BY status HAVING count(*) >= %(scan_max)s) AS cut
)
SELECT stop.id, :item_columns
FROM stop
LEFT JOIN batchwright.ingest_item AS item ON item.id = ANY(ARRAY(
    SELECT id FROM looked_at
    WHERE id <= coalesce((SELECT id FROM stop), id)
        AND (%(step)s::text IS NULL OR step = %(step)s)
        AND (%(cause)s::text IS NULL OR cause = %(cause)s)
    ORDER BY id
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

-- Cancels all open items of a run.
-- name: cancel
WITH moved AS (
    UPDATE batchwright.ingest_item SET status = 'CANCELLED', ended_at = :now
    WHERE run_id = %(run_id)s AND status = 'OPEN'
    RETURNING status
)
UPDATE batchwright.ingest_run AS run SET item_count_cancelled = item_count_cancelled + (SELECT count(*) FROM moved)
WHERE run.id = %(run_id)s
RETURNING (SELECT count(*) FROM moved)

-- Opens failed and cancelled items again, at the step that they had reached; completed steps are kept.
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

-- Steps that were put off because the run was parked may continue.
-- name: clear_waits
UPDATE batchwright.ingest_step AS step SET not_before = NULL, waiting = NULL
FROM batchwright.ingest_item AS item
WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND step.item_id = item.id
    AND step.generation = item.generation AND step.state = 'open'
    AND step.waiting ->> 'for' IN ('user', 'budget', 'credential')
RETURNING step.item_id

-- The inbox ---------------------------------------------------------------------------------------------------------

-- part: unseen
item.status = 'FAILED' AND item.dismissed_at IS NULL

-- name: inbox
-- First find the causes of each tenant, each by one step along the index, so that a large cause hides no other. Then
-- examine the items of each cause, the newest first, up to its share of `count_max`. If later runs have processed all
-- examined items of a cause, but there are more items, the cause is still shown.
WITH RECURSIVE whose AS MATERIALIZED (
    SELECT coalesce(%(tenant)s, (SELECT run.tenant FROM batchwright.ingest_run AS run WHERE run.id = %(run_id)s)) AS tenant
),
head AS (
    (
        SELECT item.tenant, item.cause FROM batchwright.ingest_item AS item
        WHERE :unseen AND item.tenant >= coalesce((SELECT tenant FROM whose), '')
        ORDER BY item.tenant, item.cause
        LIMIT 1
    )
    UNION ALL
    SELECT next.tenant, next.cause
    FROM head
    CROSS JOIN LATERAL (
        SELECT item.tenant, item.cause FROM batchwright.ingest_item AS item
        WHERE :unseen AND (item.tenant, item.cause) > (head.tenant, head.cause)
        ORDER BY item.tenant, item.cause
        LIMIT 1
    ) AS next
    WHERE next.tenant = coalesce((SELECT tenant FROM whose), next.tenant)
),
known AS MATERIALIZED (
    SELECT tenant, cause FROM head
    WHERE tenant = coalesce((SELECT tenant FROM whose), tenant)
    LIMIT %(groups_max)s + 1
),
share AS MATERIALIZED (
    SELECT greatest(20, %(count_max)s / greatest(1, count(*))) AS items, count(*) > %(groups_max)s AS is_cut FROM known
),
counted AS MATERIALIZED (
    SELECT known.cause, failed.*
    FROM known
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE is_wanted) AS n, count(*) > (SELECT items FROM share) AS has_more,
            coalesce(min(ended_at) FILTER (WHERE is_wanted), min(ended_at)) AS first_at,
            coalesce(max(ended_at) FILTER (WHERE is_wanted), max(ended_at)) AS last_at,
            (coalesce(array_agg(id ORDER BY ended_at DESC, id DESC) FILTER (WHERE is_wanted),
                array_agg(id ORDER BY ended_at DESC, id DESC)))[1:3] AS latest
        FROM (
            SELECT item.id, item.ended_at,
                CASE WHEN %(run_id)s::text IS NULL THEN NOT :is_superseded ELSE true END AS is_wanted
            FROM (
                SELECT item.id, item.ended_at, item.document_id FROM batchwright.ingest_item AS item
                WHERE :unseen AND item.tenant = known.tenant AND item.cause = known.cause
                    AND (item.run_id, item.id) < (coalesce(%(run_id)s, 's'), 'j')
                    AND item.run_id >= coalesce(%(run_id)s, '') COLLATE "C"
                ORDER BY item.run_id DESC, item.id DESC
                LIMIT (SELECT items + 1 FROM share)
            ) AS item
            OFFSET 0
        ) AS looked_at
    ) AS failed
    WHERE failed.n > 0 OR failed.has_more
),
grouped AS (
    SELECT cause, sum(n)::bigint AS n, min(first_at) AS first_at, max(last_at) AS last_at,
        bool_or(has_more) OR (SELECT is_cut FROM share) AS has_more
    FROM counted GROUP BY cause
    ORDER BY sum(n) DESC, cause
    LIMIT %(limit)s
)
SELECT grouped.cause, latest.errors[1] ->> 'step', latest.kinds[1], latest.errors[1] ->> 'code', grouped.n,
    grouped.first_at, grouped.last_at, latest.ids[1:3], latest.names[1:3], latest.errors[1] ->> 'message',
    latest.jobs[1:3], grouped.has_more
FROM grouped
CROSS JOIN LATERAL (
    SELECT array_agg(item.last_error ORDER BY item.ended_at DESC, item.id DESC) AS errors,
        array_agg(item.last_error_kind ORDER BY item.ended_at DESC, item.id DESC) AS kinds,
        array_agg(item.id ORDER BY item.ended_at DESC, item.id DESC) AS ids,
        array_agg(item.name ORDER BY item.ended_at DESC, item.id DESC) AS names,
        array_agg(:last_job ORDER BY item.ended_at DESC, item.id DESC) AS jobs
    FROM batchwright.ingest_item AS item
    WHERE item.id = ANY(ARRAY(SELECT unnest(counted.latest) FROM counted WHERE counted.cause = grouped.cause))
) AS latest
ORDER BY grouped.n DESC, grouped.cause

-- name: dismiss
UPDATE batchwright.ingest_item SET dismissed_at = :now
WHERE status = 'FAILED' AND dismissed_at IS NULL AND tenant = coalesce(%(tenant)s, tenant)
    AND (%(run_id)s::text IS NULL OR run_id = %(run_id)s)
    AND (%(ids)s::text[] IS NULL OR id = ANY(%(ids)s))
    AND (%(cause)s::text IS NULL OR cause = %(cause)s)
RETURNING id

-- Runs with failed items that a retry over several runs would touch: each tenant, cause and run is one step along the
-- index. Of each, the first `scan_max` items are examined; a run with more is always included.
-- name: runs_with_failures
WITH RECURSIVE head AS (
    (
        SELECT item.tenant, item.cause, item.run_id FROM batchwright.ingest_item AS item
        WHERE :unseen AND %(ids)s::text[] IS NULL AND (item.tenant, item.cause)
            >= (coalesce(%(tenant)s, ''), CASE WHEN %(tenant)s::text IS NULL THEN '' ELSE coalesce(%(cause)s, '') END)
        ORDER BY item.tenant, item.cause, item.run_id
        LIMIT 1
    )
    UNION ALL
    SELECT next.tenant, next.cause, next.run_id
    FROM head
    CROSS JOIN LATERAL (
        SELECT item.tenant, item.cause, item.run_id FROM batchwright.ingest_item AS item
        WHERE :unseen AND (item.tenant, item.cause, item.run_id) > (head.tenant, head.cause, head.run_id)
        ORDER BY item.tenant, item.cause, item.run_id
        LIMIT 1
    ) AS next
    WHERE next.tenant = coalesce(%(tenant)s, next.tenant)
        AND (%(tenant)s::text IS NULL OR next.cause = coalesce(%(cause)s, next.cause))
)
SELECT head.run_id
FROM (SELECT * FROM head LIMIT %(heads_max)s) AS head
CROSS JOIN LATERAL (
    SELECT count(*) AS n, count(*) FILTER (WHERE NOT (%(only_latest)s AND :is_superseded)) AS wanted
    FROM (
        SELECT item.id, item.document_id FROM batchwright.ingest_item AS item
        WHERE :unseen AND item.tenant = head.tenant AND item.cause = head.cause AND item.run_id = head.run_id
        ORDER BY item.id DESC
        LIMIT %(scan_max)s
    ) AS item
) AS looked_at
WHERE head.tenant = coalesce(%(tenant)s, head.tenant) AND head.cause = coalesce(%(cause)s, head.cause)
    AND (looked_at.wanted > 0 OR looked_at.n >= %(scan_max)s)
UNION
SELECT item.run_id FROM batchwright.ingest_item AS item
WHERE item.id = ANY(%(ids)s::text[]) AND :unseen AND item.tenant = coalesce(%(tenant)s, item.tenant)
    AND item.cause = coalesce(%(cause)s, item.cause) AND NOT (%(only_latest)s AND :is_superseded)
ORDER BY 1
LIMIT %(limit)s

-- Watching ----------------------------------------------------------------------------------------------------------

-- Open items, in the order of their listing. The run itself counts those that have ended.
-- name: funnel
SELECT first.step, count(*)
FROM (
    SELECT item.step FROM batchwright.ingest_item AS item
    WHERE item.run_id = %(run_id)s AND item.status = 'OPEN'
    ORDER BY item.run_id, item.status, item.id
    LIMIT %(count_max)s
) AS first
GROUP BY first.step

-- name: steps
SELECT step.step, step.state, step.is_reused, step.starts, step.retry_count, step.error_kind, step.not_before,
       step.waiting, step.started_at, step.ended_at, step.output
FROM batchwright.ingest_step AS step
JOIN batchwright.ingest_item AS item ON item.id = step.item_id AND item.generation = step.generation
WHERE step.item_id = %(id)s

-- name: waits
SELECT step.waiting ->> 'for', step.waiting ->> 'message', count(*), min(step.not_before)
FROM (
    SELECT item.id, item.generation FROM batchwright.ingest_item AS item
    WHERE item.run_id = %(run_id)s AND item.status = 'OPEN'
    ORDER BY item.run_id, item.status, item.id
    LIMIT %(count_max)s
) AS item
CROSS JOIN LATERAL (
    SELECT step.waiting, step.not_before FROM batchwright.ingest_step AS step
    WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'open'
        AND step.waiting IS NOT NULL
    OFFSET 0
) AS step
GROUP BY 1, 2
ORDER BY 3 DESC
LIMIT %(limit)s

-- Upkeep ------------------------------------------------------------------------------------------------------------

-- Open items whose job ended, but did not end the item.
-- name: abandoned
SELECT item.id, job.status
FROM batchwright.ingest_run AS run
JOIN batchwright.ingest_item AS item ON item.run_id = run.id AND item.status = 'OPEN'
JOIN :jobs AS job ON job.id = :last_job AND NOT job.is_open
WHERE run.ended_at IS NULL
ORDER BY item.id
LIMIT %(limit)s

-- Items that were put off because their run was parked, and whose jobs went to sleep after `resume` woke the others.
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
