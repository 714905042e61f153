-- Answers by content, requests in flight, and costs.

-- name: answers
SELECT hash, value FROM batchwright.ingest_answer
WHERE tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND hash = ANY(%(hashes)s::bytea[])

-- At most once a day for each answer: every written row must be vacuumed later.
-- name: touch
UPDATE batchwright.ingest_answer SET used_at = :now
WHERE tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND hash = ANY(%(hashes)s::bytea[])
    AND used_at < :now - interval '1 day'
RETURNING hash

-- name: keep
INSERT INTO batchwright.ingest_answer AS answer (tenant, fingerprint, hash, value, tokens, used_at)
SELECT %(tenant)s, %(fingerprint)s, given.hash, given.value, given.tokens, :now
FROM unnest(%(hashes)s::bytea[], %(values)s::bytea[], %(tokens)s::integer[]) AS given (hash, value, tokens)
ORDER BY given.hash
ON CONFLICT DO NOTHING
RETURNING hash

-- Reserves what a request may cost before it is sent; no row means that the budget does not allow it.
-- name: begin
WITH run AS (
    UPDATE batchwright.ingest_run SET reserved = reserved + coalesce(%(cost)s, 0)
    WHERE id = %(run_id)s AND status = 'RUNNING'
        AND (budget IS NULL OR spent + reserved + coalesce(%(cost)s, 0) <= budget)
    RETURNING id
)
INSERT INTO batchwright.ingest_call (
    id, tenant, run_id, item_id, job_id, claim, kind, model, lane, inputs, tokens, cost, began_at)
SELECT %(id)s, %(tenant)s, run.id, %(item_id)s, %(job_id)s, %(claim)s, %(kind)s, %(model)s, %(lane)s, %(inputs)s, %(tokens)s,
       %(cost)s, :now
FROM run
RETURNING id

-- name: why_not
SELECT status::text, budget, spent, reserved FROM batchwright.ingest_run WHERE id = %(run_id)s

-- The real cost replaces the reservation, even if the request was already in doubt.
-- name: settle
WITH call AS (
    DELETE FROM batchwright.ingest_call WHERE id = %(id)s RETURNING run_id, item_id, cost
),
item AS (
    UPDATE batchwright.ingest_item AS item SET
        cost = item.cost + coalesce(%(cost)s, 0),
        prompt_tokens = item.prompt_tokens + %(prompt_tokens)s,
        completion_tokens = item.completion_tokens + %(completion_tokens)s
    FROM call WHERE item.id = call.item_id
),
run AS (
    UPDATE batchwright.ingest_run AS run SET
        reserved = greatest(0, run.reserved - coalesce(call.cost, 0)),
        spent = run.spent + coalesce(%(cost)s, 0),
        has_unknown_cost = run.has_unknown_cost OR %(is_unknown)s,
        prompt_tokens = run.prompt_tokens + %(prompt_tokens)s,
        completion_tokens = run.completion_tokens + %(completion_tokens)s,
        calls = run.calls + 1
    FROM call WHERE run.id = call.run_id
)
SELECT count(*) FROM call

-- name: doubt
UPDATE batchwright.ingest_call SET is_doubtful = true WHERE id = %(id)s RETURNING id

-- Requests that an earlier claim sent: their worker is gone, and they may or may not have been answered.
-- name: doubt_older
UPDATE batchwright.ingest_call SET is_doubtful = true
WHERE item_id = %(item_id)s AND NOT is_doubtful AND (job_id, claim) <> (%(job_id)s, %(claim)s)
RETURNING id, job_id, claim, kind, model, tokens, cost

-- Requests of jobs that have ended; their workers have had enough time to settle them.
-- name: doubt_ended
UPDATE batchwright.ingest_call AS call SET is_doubtful = true
FROM (
    SELECT unsettled.id FROM batchwright.ingest_call AS unsettled
    LEFT JOIN :jobs AS job ON job.id = unsettled.job_id
    WHERE NOT unsettled.is_doubtful AND unsettled.item_id IS NOT NULL AND (job.id IS NULL OR NOT job.is_open)
        AND unsettled.began_at < :now - interval '10 minutes'
    ORDER BY unsettled.id
    LIMIT %(limit)s
) AS ended
WHERE call.id = ended.id AND NOT call.is_doubtful
RETURNING call.id, call.job_id, call.claim, call.kind, call.model, call.tokens, call.cost

-- name: evict
WITH old AS (
    SELECT tenant, fingerprint, hash FROM batchwright.ingest_answer
    WHERE used_at < :now - make_interval(secs => %(keep_seconds)s::float8)
    ORDER BY used_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM batchwright.ingest_answer AS answer USING old
WHERE (answer.tenant, answer.fingerprint, answer.hash) = (old.tenant, old.fingerprint, old.hash)
RETURNING answer.hash
