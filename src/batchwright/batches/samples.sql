-- The progress of a batch over time: what was registered when, and how many requests were in flight.

-- name: read
SELECT model, at, seconds, completed, failed, input_tokens, cached_tokens, output_tokens, load
FROM batchwright.batch_sample
WHERE batch_id = %(batch_id)s
ORDER BY at DESC, model
LIMIT %(limit)s

-- name: forget
DELETE FROM batchwright.batch_sample
WHERE (batch_id, at, model) IN (
    SELECT old.batch_id, old.at, old.model FROM batchwright.batch_sample AS old
    WHERE old.at < :now - make_interval(secs => %(kept_seconds)s)
    ORDER BY old.at
    LIMIT %(limit)s)
RETURNING batch_id
