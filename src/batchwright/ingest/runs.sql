-- Runs and their items: every transition is a compare-and-set.

-- part: run_columns
run.id, run.tenant, run.collection_id, collection.name, run.kind, run.status::text, run.sources, run.config, run.recipe,
run.lane, run.priority, run.metadata, run.job_id, run.traceparent, run.estimate, run.budget, run.spent, run.reserved,
run.has_unknown_cost, run.prompt_tokens, run.completion_tokens, run.calls, run.item_count_total, run.item_count_done,
run.item_count_unchanged, run.item_count_failed, run.item_count_cancelled, run.retired_count, run.skipped, run.listed_at,
run.is_complete, run.parked_reason, run.parked_message, run.error, run.deadline_at, extract(epoch FROM run.deadline_at - :now)::float8, run.gather_job_ids, run.resumed_at,
run.created_at, run.started_at, run.ended_at

-- part: with_collection
JOIN batchwright.ingest_collection AS collection ON collection.id = run.collection_id

-- Collections -------------------------------------------------------------------------------------------------------

-- name: add_collection
INSERT INTO batchwright.ingest_collection (tenant, name, language, created_at)
VALUES (%(tenant)s, %(name)s, %(language)s, :now)
ON CONFLICT DO NOTHING
RETURNING id

-- name: find_collection
SELECT id FROM batchwright.ingest_collection WHERE tenant = %(tenant)s AND name = %(name)s AND deleted_at IS NULL
FOR KEY SHARE

-- Runs --------------------------------------------------------------------------------------------------------------

-- name: insert
INSERT INTO batchwright.ingest_run (
    id, tenant, collection_id, kind, sources, config, recipe, lane, priority, metadata, job_id, idempotency_key,
    idempotency_digest, traceparent, estimate, budget, deadline_at, created_at)
VALUES (
    %(id)s, %(tenant)s, %(collection_id)s, %(kind)s, %(sources)s::jsonb, %(config)s::jsonb, %(recipe)s, %(lane)s,
    %(priority)s, %(metadata)s::jsonb, %(job_id)s, %(idempotency_key)s, %(idempotency_digest)s, %(traceparent)s,
    %(estimate)s::jsonb, %(budget)s, :now + make_interval(secs => %(deadline_seconds)s::float8), :now)
ON CONFLICT DO NOTHING
RETURNING id

-- The run that caused the conflict: the same one, created by a call whose answer was lost, or the one with the key.
-- name: known
SELECT run.idempotency_digest, :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id = %(id)s OR (run.tenant = %(tenant)s AND run.idempotency_key = %(idempotency_key)s)
ORDER BY run.id <> %(id)s
LIMIT 1

-- name: get
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id = %(id)s AND run.tenant = coalesce(%(tenant)s, run.tenant)

-- name: lock
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id = %(id)s AND run.tenant = coalesce(%(tenant)s, run.tenant)
FOR NO KEY UPDATE OF run

-- By tenant and id, written so that only the index of both can be used.
-- name: list
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE (run.tenant, run.id) < (%(tenant)s, coalesce(%(after)s, 's')) AND run.tenant >= %(tenant)s
ORDER BY run.tenant DESC, run.id DESC
LIMIT %(limit)s

-- name: list_everywhere
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id < coalesce(%(after)s, 's') COLLATE "C"
ORDER BY run.id DESC
LIMIT %(limit)s

-- By status: the newest of each status and tenant, because `list` would read all others to find a few. Written so that
-- only the index of all three columns can be used.
-- name: list_by_status
WITH RECURSIVE known AS (
    (SELECT one.tenant FROM batchwright.ingest_run AS one WHERE %(tenant)s::text IS NULL ORDER BY one.tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT next.tenant FROM batchwright.ingest_run AS next WHERE next.tenant > known.tenant
            ORDER BY next.tenant LIMIT 1)
    FROM known WHERE known.tenant IS NOT NULL
),
wanted AS (
    SELECT whose.tenant, status::batchwright.run_status AS status
    FROM (SELECT tenant FROM known UNION ALL SELECT %(tenant)s::text) AS whose, unnest(%(statuses)s::text[]) AS status
    WHERE whose.tenant IS NOT NULL
)
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id = ANY(ARRAY(
    SELECT newest.id
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT one.id FROM batchwright.ingest_run AS one
        WHERE (one.tenant, one.status, one.id) < (wanted.tenant, wanted.status, coalesce(%(after)s, 's'))
            AND (one.tenant, one.status) >= (wanted.tenant, wanted.status)
        ORDER BY one.tenant DESC, one.status DESC, one.id DESC
        LIMIT %(limit)s
    ) AS newest
    ORDER BY newest.id DESC
    LIMIT %(limit)s))
ORDER BY run.id DESC

-- Runs of all collections with this name: a deleted collection may have had the same name.
-- name: list_of_collection
SELECT :run_columns
FROM batchwright.ingest_run AS run :with_collection
WHERE run.id = ANY(ARRAY(
    SELECT newest.id
    FROM batchwright.ingest_collection AS wanted
    CROSS JOIN unnest(%(statuses)s::text[]) AS kind (status)
    CROSS JOIN LATERAL (
        SELECT one.id FROM batchwright.ingest_run AS one
        WHERE (one.collection_id, one.status, one.id)
                < (wanted.id, kind.status::batchwright.run_status, coalesce(%(after)s, 's'))
            AND (one.collection_id, one.status) >= (wanted.id, kind.status::batchwright.run_status)
        ORDER BY one.collection_id DESC, one.status DESC, one.id DESC
        LIMIT %(limit)s
    ) AS newest
    WHERE wanted.name = %(collection)s AND wanted.tenant = coalesce(%(tenant)s, wanted.tenant)
    ORDER BY newest.id DESC
    LIMIT %(limit)s))
ORDER BY run.id DESC

-- name: begin
UPDATE batchwright.ingest_run SET status = 'RUNNING', started_at = coalesce(started_at, :now)
WHERE id = %(id)s AND status = 'PENDING'
RETURNING status::text

-- name: park
UPDATE batchwright.ingest_run SET status = 'PARKED', parked_reason = %(reason)s, parked_message = %(message)s
WHERE id = %(id)s AND status IN ('PENDING', 'RUNNING')
RETURNING status::text

-- name: resume
UPDATE batchwright.ingest_run SET status = 'RUNNING', parked_reason = NULL, parked_message = NULL,
    started_at = coalesce(started_at, :now), resumed_at = :now, budget = coalesce(%(budget)s, budget)
WHERE id = %(id)s AND status = 'PARKED'
RETURNING status::text

-- name: complete
UPDATE batchwright.ingest_run SET status = 'COMPLETED', ended_at = :now
WHERE id = %(id)s AND status = 'RUNNING'
RETURNING status::text

-- name: complete_with_errors
UPDATE batchwright.ingest_run SET status = 'COMPLETED_WITH_ERRORS', ended_at = :now
WHERE id = %(id)s AND status = 'RUNNING'
RETURNING status::text

-- name: fail
UPDATE batchwright.ingest_run SET status = 'FAILED', ended_at = :now, error = %(error)s::jsonb,
    parked_reason = NULL, parked_message = NULL
WHERE id = %(id)s AND status IN ('PENDING', 'RUNNING', 'PARKED')
RETURNING status::text

-- name: cancel
UPDATE batchwright.ingest_run SET status = 'CANCELLED', ended_at = :now, parked_reason = NULL, parked_message = NULL
WHERE id = %(id)s AND status IN ('PENDING', 'RUNNING', 'PARKED')
RETURNING status::text

-- name: reopen
UPDATE batchwright.ingest_run SET status = 'RUNNING', ended_at = NULL, error = NULL, job_id = %(job_id)s
WHERE id = %(id)s AND status IN ('COMPLETED_WITH_ERRORS', 'FAILED', 'CANCELLED')
RETURNING status::text

-- Listing -----------------------------------------------------------------------------------------------------------

-- name: add_documents
INSERT INTO batchwright.ingest_document (collection_id, source, name, created_at, updated_at)
SELECT %(collection_id)s, listed.source, listed.name, :now, :now
FROM jsonb_to_recordset(%(items)s::jsonb) AS listed (source text, name text)
WHERE NOT EXISTS (
    SELECT FROM batchwright.ingest_document AS document
    WHERE document.collection_id = %(collection_id)s AND md5(document.source) = md5(listed.source))
ORDER BY md5(listed.source)
ON CONFLICT DO NOTHING
RETURNING id

-- A source with the same etag and recipe as its live version is unchanged, and is not fetched.
-- name: add_items
WITH listed AS (
    SELECT * FROM jsonb_to_recordset(%(items)s::jsonb) AS listed (
        id text, job_id uuid, source text, name text, etag text, size bigint, metadata jsonb)
),
added AS (
    INSERT INTO batchwright.ingest_item (
        id, job_ids, run_id, tenant, collection_id, document_id, source, name, etag, size, metadata, created_at,
        status, step, ended_at)
    SELECT listed.id, ARRAY[listed.job_id], run.id, run.tenant, run.collection_id, document.id, listed.source, listed.name,
           listed.etag, listed.size, coalesce(listed.metadata, '{}'), :now,
           CASE WHEN same.yes THEN 'UNCHANGED' ELSE 'OPEN' END::batchwright.item_status,
           CASE WHEN same.yes THEN 'DONE' ELSE 'ENQUEUED' END,
           CASE WHEN same.yes THEN :now END
    FROM listed
    JOIN batchwright.ingest_run AS run ON run.id = %(run_id)s
    JOIN batchwright.ingest_document AS document
        ON document.collection_id = run.collection_id AND md5(document.source) = md5(listed.source)
    LEFT JOIN batchwright.ingest_version AS version ON version.id = document.live_version
    CROSS JOIN LATERAL (
        SELECT NOT %(force)s AND coalesce(document.etag = listed.etag AND version.recipe = run.recipe, false) AS yes
    ) AS same
    ON CONFLICT (run_id, document_id) DO NOTHING
    RETURNING status
),
counted AS (
    UPDATE batchwright.ingest_run SET
        item_count_total = item_count_total + (SELECT count(*) FROM added),
        item_count_unchanged = item_count_unchanged + (SELECT count(*) FROM added WHERE status = 'UNCHANGED')
    WHERE id = %(run_id)s
)
SELECT count(*) FROM added

-- name: end_listing
UPDATE batchwright.ingest_run SET listed_at = :now, is_complete = %(is_complete)s, skipped = %(skipped)s::jsonb
WHERE id = %(id)s AND listed_at IS NULL
RETURNING id

-- Documents of the collection below the sources of a run that its complete listing did not find. Leaves out documents
-- that another run has found since this one began: they may not have existed when this run listed its sources.
-- name: retire_missing
WITH missing AS (
    SELECT document.id, document.live_version
    FROM batchwright.ingest_run AS run
    JOIN batchwright.ingest_document AS document ON document.collection_id = run.collection_id
    JOIN batchwright.ingest_version AS version ON version.id = document.live_version
    WHERE run.id = %(run_id)s AND run.is_complete AND version.created_at < run.started_at
        AND EXISTS (SELECT FROM unnest(%(prefixes)s::text[]) AS prefix WHERE starts_with(document.source, prefix))
        AND NOT EXISTS (
            SELECT FROM batchwright.ingest_item AS item
            WHERE item.document_id = document.id AND (item.run_id = run.id OR item.created_at >= run.started_at))
    ORDER BY document.id
    LIMIT %(limit)s
    FOR NO KEY UPDATE OF document
)
SELECT id, live_version FROM missing

-- name: count_retired
UPDATE batchwright.ingest_run SET retired_count = retired_count + %(count)s WHERE id = %(run_id)s RETURNING id

-- Watching ----------------------------------------------------------------------------------------------------------

-- name: parked
SELECT run.id, collection.name, run.parked_reason, run.parked_message, run.job_id, run.item_count_total
    - run.item_count_done - run.item_count_unchanged - run.item_count_failed - run.item_count_cancelled, run.created_at
FROM batchwright.ingest_run AS run :with_collection
WHERE run.ended_at IS NULL AND run.status = 'PARKED' AND run.tenant = coalesce(%(tenant)s, run.tenant)
ORDER BY run.id
LIMIT %(limit)s

-- name: in_doubt
SELECT count(*), coalesce(sum(cost), 0), coalesce(sum(tokens), 0)
FROM batchwright.ingest_call
WHERE run_id = %(run_id)s AND is_doubtful

-- Upkeep ------------------------------------------------------------------------------------------------------------

-- name: abandoned_runs
SELECT run.id, job.status
FROM batchwright.ingest_run AS run
LEFT JOIN :jobs AS job ON job.id = run.job_id
WHERE run.ended_at IS NULL AND (job.id IS NULL OR NOT job.is_open)
ORDER BY run.id
LIMIT %(limit)s

-- name: old
SELECT id, job_id FROM batchwright.ingest_run
WHERE ended_at < :now - make_interval(secs => %(keep_seconds)s::float8)
ORDER BY ended_at, id
LIMIT %(limit)s

-- name: remove
WITH calls AS (
    DELETE FROM batchwright.ingest_call WHERE run_id = %(id)s
)
DELETE FROM batchwright.ingest_run WHERE id = %(id)s AND ended_at IS NOT NULL RETURNING id

-- Copies of sources, including those that a worker had no time to remove; and texts that no version or other run uses.
-- name: objects
SELECT step.output ->> 'blob_key'
FROM batchwright.ingest_item AS item
JOIN batchwright.ingest_step AS step ON step.item_id = item.id
WHERE item.run_id = %(id)s AND step.output ? 'blob_key'
UNION
SELECT step.output ->> 'text_key'
FROM batchwright.ingest_item AS item
JOIN batchwright.ingest_step AS step ON step.item_id = item.id
WHERE item.run_id = %(id)s AND step.output ? 'text_key'
    AND NOT EXISTS (
        SELECT FROM batchwright.ingest_version AS version
        WHERE version.document_id = item.document_id
            AND version.steps -> 'CONTENT_EXTRACTED' -> 'output' ->> 'text_key' = step.output ->> 'text_key')
    AND NOT EXISTS (
        SELECT FROM batchwright.ingest_item AS other
        JOIN batchwright.ingest_step AS theirs ON theirs.item_id = other.id
        WHERE other.document_id = item.document_id AND other.run_id <> item.run_id
            AND other.status IN ('OPEN', 'FAILED', 'CANCELLED')
            AND theirs.output ->> 'text_key' = step.output ->> 'text_key')

-- Jobs of items that were retried, and those that gather requests, are not children of the run's job.
-- name: other_jobs
SELECT DISTINCT unnest(item.job_ids[2:]) FROM batchwright.ingest_item AS item WHERE item.run_id = %(id)s
UNION
SELECT unnest(run.gather_job_ids) FROM batchwright.ingest_run AS run WHERE run.id = %(id)s
