-- Data that is no longer needed. Each walk follows an index from where the last step stopped, so rows that must stay are
-- read once and do not slow down later statements. `is_dry` also finds what an earlier step would have released.

-- part: ended
coalesce(batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)

-- part: open
batch.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- Its files could not be written, so its answers are all there is; or lines failed because they had no answers, and some
-- of those may still be found.
-- part: repairable
(batch.in_progress_at IS NOT NULL AND batch.status IN ('failed', 'expired', 'cancelled')
    AND (batch.manifest IS NULL OR jsonb_exists(batch.error_summary, 'batch_failed')))

-- part: over
:ended < :now - make_interval(secs => CASE WHEN :repairable THEN %(failed_kept_seconds)s::float8 ELSE %(kept_seconds)s::float8 END)

-- The database's time and a name for the database, which it keeps through dumps, upgrades and moves.
-- name: here
SELECT :now, to_char(applied_at AT TIME ZONE 'UTC', 'YYYYMMDD"T"HH24MISSUS') FROM batchwright.migration WHERE number = 1

-- name: expired_files
SELECT expires_at, id
FROM batchwright.file
WHERE expires_at IS NOT NULL AND deleted_at IS NULL AND expires_at <= :now
    AND (expires_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
ORDER BY expires_at, id
LIMIT %(limit)s

-- name: delete_expired
UPDATE batchwright.file SET deleted_at = expires_at, idempotency_key = NULL
WHERE id = ANY(%(ids)s) AND deleted_at IS NULL AND expires_at <= :now
RETURNING id

-- A batch reads its input until it ends or can no longer be repaired; a retry also reads the error file of the batch that
-- it retries; what other parts still read is in file_use. Scalar subqueries, because the planner cannot turn them into a
-- scan of all batches.
-- name: deleted_files
WITH asked AS MATERIALIZED (
    SELECT first.error_file_id AS id
    FROM batchwright.batch
    JOIN batchwright.batch AS first ON first.id = batch.retry_of
    WHERE :open AND first.error_file_id IS NOT NULL
),
gone AS MATERIALIZED (
    (
        SELECT deleted_at AS at, id, key, bytes
        FROM batchwright.file
        WHERE deleted_at IS NOT NULL AND deleted_at < :now - make_interval(secs => %(grace_seconds)s::float8)
            AND (deleted_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
        ORDER BY deleted_at, id
        LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT expires_at, id, key, bytes
        FROM batchwright.file
        WHERE %(is_dry)s::boolean AND deleted_at IS NULL AND expires_at IS NOT NULL
            AND expires_at < :now - make_interval(secs => %(grace_seconds)s::float8)
            AND (expires_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
        ORDER BY expires_at, id
        LIMIT %(limit)s
    )
    ORDER BY at, id
    LIMIT %(limit)s
)
SELECT gone.at, gone.id, gone.key, gone.bytes,
    gone.id = ANY(ARRAY(SELECT id FROM asked))
    OR (
        SELECT batch.id FROM batchwright.batch
        WHERE batch.input_file_id = gone.id AND (:open OR (:repairable AND batch.segments_gone_at IS NULL))
        LIMIT 1
    ) IS NOT NULL
    OR (SELECT use.owner FROM batchwright.file_use AS use WHERE use.file_id = gone.id LIMIT 1) IS NOT NULL
FROM gone
ORDER BY gone.at, gone.id

-- name: remove_files
DELETE FROM batchwright.file WHERE id = ANY(%(ids)s) AND deleted_at IS NOT NULL RETURNING bytes

-- name: upload_leftovers
SELECT over_at, id
FROM batchwright.upload
WHERE parts_gone_at IS NULL AND over_at < :now - make_interval(secs => %(grace_seconds)s::float8)
    AND (status <> 'pending' OR %(is_dry)s::boolean)
    AND (over_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
ORDER BY over_at, id
LIMIT %(limit)s

-- name: remove_parts
WITH ended AS (
    UPDATE batchwright.upload SET parts_gone_at = :now WHERE id = %(id)s AND status <> 'pending' RETURNING id
)
DELETE FROM batchwright.upload_part WHERE upload_id = ANY(ARRAY(SELECT id FROM ended)) RETURNING id

-- name: known_uploads
SELECT id, parts_gone_at IS NOT NULL FROM batchwright.upload WHERE id = ANY(%(ids)s)

-- name: old_uploads
(
    SELECT over_at AS at, id
    FROM batchwright.upload
    WHERE parts_gone_at IS NOT NULL AND over_at < :now - make_interval(secs => %(keep_seconds)s::float8)
        AND (over_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
    ORDER BY over_at, id
    LIMIT %(limit)s
)
UNION ALL
(
    SELECT over_at, id
    FROM batchwright.upload
    WHERE %(is_dry)s::boolean AND parts_gone_at IS NULL
        AND over_at < :now - make_interval(secs => %(keep_seconds)s::float8)
        AND (over_at, id) > (%(after)s::timestamptz, %(after_id)s::text)
    ORDER BY over_at, id
    LIMIT %(limit)s
)
ORDER BY at, id
LIMIT %(limit)s

-- name: remove_uploads
DELETE FROM batchwright.upload WHERE id = ANY(%(ids)s) AND parts_gone_at IS NOT NULL RETURNING id

-- name: let_segments_go
UPDATE batchwright.batch SET segments_gone_at = :now
WHERE id = ANY(ARRAY(
    SELECT id FROM batchwright.batch
    WHERE leftovers_gone_at IS NULL AND segments_gone_at IS NULL AND :over
        AND :ended < :now - make_interval(secs => least(%(failed_kept_seconds)s::float8, %(kept_seconds)s::float8))
    ORDER BY :ended, id
    LIMIT %(limit)s
    FOR NO KEY UPDATE SKIP LOCKED
))
RETURNING id

-- name: leftovers
SELECT :ended, id
FROM batchwright.batch
WHERE leftovers_gone_at IS NULL AND (segments_gone_at IS NOT NULL OR (%(is_dry)s::boolean AND :over))
    AND (:ended, id) > (%(after)s::timestamptz, %(after_id)s::text)
ORDER BY :ended, id
LIMIT %(limit)s

-- name: count_segments
SELECT count(*) FROM batchwright.batch_segment WHERE batch_id = %(id)s

-- name: remove_segments
WITH removed AS (
    DELETE FROM batchwright.batch_segment
    WHERE id = ANY(ARRAY(
        SELECT id FROM batchwright.batch_segment WHERE batch_id = %(id)s ORDER BY id LIMIT %(limit)s))
    RETURNING id
)
SELECT count(*) FROM removed

-- name: end_leftovers
UPDATE batchwright.batch SET leftovers_gone_at = :now WHERE id = %(id)s AND segments_gone_at IS NOT NULL RETURNING id

-- name: known_batches
SELECT id, leftovers_gone_at IS NOT NULL FROM batchwright.batch WHERE id = ANY(%(ids)s)

-- name: known_files
SELECT key FROM batchwright.file WHERE key = ANY(%(keys)s)

-- name: keys_of_files
SELECT tenant, idempotency_key, id,
    created_at < :now - make_interval(secs => %(keep_seconds)s::float8) AND (expires_at IS NULL OR expires_at > :now)
FROM batchwright.file
WHERE idempotency_key IS NOT NULL AND (tenant, idempotency_key) > (%(after)s::text, %(after_id)s::text)
ORDER BY tenant, idempotency_key
LIMIT %(limit)s

-- name: clear_keys_of_files
UPDATE batchwright.file SET idempotency_key = NULL WHERE id = ANY(%(ids)s) AND idempotency_key IS NOT NULL RETURNING id

-- name: keys_of_batches
SELECT tenant, idempotency_key, id, created_at < :now - make_interval(secs => %(keep_seconds)s::float8)
FROM batchwright.batch
WHERE idempotency_key IS NOT NULL AND (tenant, idempotency_key) > (%(after)s::text, %(after_id)s::text)
ORDER BY tenant, idempotency_key
LIMIT %(limit)s

-- name: clear_keys_of_batches
UPDATE batchwright.batch SET idempotency_key = NULL, idempotency_digest = NULL
WHERE id = ANY(%(ids)s) AND idempotency_key IS NOT NULL
RETURNING id

-- A batch is kept as long as its job or a retry of it is open.
-- name: old_batches
WITH old AS MATERIALIZED (
    (
        SELECT :ended AS at, id, job_id, family
        FROM batchwright.batch
        WHERE leftovers_gone_at IS NOT NULL AND :ended < :now - make_interval(secs => %(keep_seconds)s::float8)
            AND (:ended, id) > (%(after)s::timestamptz, %(after_id)s::text)
        ORDER BY :ended, id
        LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT :ended, id, job_id, family
        FROM batchwright.batch
        WHERE %(is_dry)s::boolean AND leftovers_gone_at IS NULL AND :ended < :now - make_interval(secs => %(keep_seconds)s::float8)
            AND (segments_gone_at IS NOT NULL OR :over)
            AND (:ended, id) > (%(after)s::timestamptz, %(after_id)s::text)
        ORDER BY :ended, id
        LIMIT %(limit)s
    )
    ORDER BY at, id
    LIMIT %(limit)s
)
SELECT old.at, old.id, old.job_id,
    (SELECT job.id FROM :jobs AS job WHERE job.id = old.job_id AND job.is_open) IS NULL
    AND (
        SELECT batch.id FROM batchwright.batch
        WHERE batch.family = old.family AND batch.retry_of = old.id AND :open
        LIMIT 1
    ) IS NULL
FROM old
ORDER BY old.at, old.id

-- name: remove_batch
DELETE FROM batchwright.batch WHERE id = %(id)s AND leftovers_gone_at IS NOT NULL RETURNING id
