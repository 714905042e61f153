-- Requests that documents wait for in the batch lane.

-- Requests that already exist, or were just answered, are not added. A row that would never be sent now belongs to this
-- item: its own item has ended, its run is parked or has ended, or its request failed for another run.
-- name: add
INSERT INTO batchwright.ingest_request AS request (
    tenant, fingerprint, hash, run_id, item_id, kind, model, input, tokens, created_at)
SELECT %(tenant)s, %(fingerprint)s, given.hash, %(run_id)s, %(item_id)s, %(kind)s, %(model)s, given.input, given.tokens, :now
FROM unnest(%(hashes)s::bytea[], %(inputs)s::text[], %(tokens)s::integer[]) AS given (hash, input, tokens)
WHERE NOT EXISTS (
    SELECT FROM batchwright.ingest_answer AS answer
    WHERE answer.tenant = %(tenant)s AND answer.fingerprint = %(fingerprint)s AND answer.hash = given.hash)
ORDER BY given.hash
ON CONFLICT (tenant, fingerprint, hash) DO UPDATE
SET run_id = EXCLUDED.run_id, item_id = EXCLUDED.item_id, failures = 0, error = NULL, created_at = :now
WHERE request.batch_id IS NULL AND CASE
    WHEN request.error IS NOT NULL THEN request.run_id <> EXCLUDED.run_id
    ELSE NOT EXISTS (
        SELECT FROM batchwright.ingest_item AS item
        JOIN batchwright.ingest_run AS run ON run.id = item.run_id AND run.status = 'RUNNING'
        WHERE item.id = request.item_id AND item.status = 'OPEN')
    END
RETURNING hash

-- name: states
SELECT hash, run_id, item_id, batch_id, error, created_at, extract(epoch FROM :now - created_at)::float8
FROM batchwright.ingest_request
WHERE tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND hash = ANY(%(hashes)s::bytea[])

-- Requests that are in no batch; the others are collected with their batch.
-- name: withdraw
DELETE FROM batchwright.ingest_request
WHERE tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND hash = ANY(%(hashes)s::bytea[]) AND run_id = %(run_id)s
    AND batch_id IS NULL
RETURNING hash

-- How many items of the run were listed before this one, up to a limit.
-- name: before
SELECT count(*) FROM (
    SELECT FROM batchwright.ingest_item
    WHERE run_id = %(run_id)s AND id < %(item_id)s COLLATE "C" AND status <> 'UNCHANGED'
    LIMIT %(limit)s
) AS found

-- The gatherer ------------------------------------------------------------------------------------------------------

-- name: gatherer
SELECT job.is_open
FROM batchwright.ingest_run AS run
JOIN :jobs AS job ON job.id = run.gather_job_ids[cardinality(run.gather_job_ids)]
WHERE run.id = %(run_id)s

-- name: add_gatherer
UPDATE batchwright.ingest_run SET gather_job_ids = gather_job_ids || %(job_id)s::uuid
WHERE id = %(run_id)s
RETURNING id

-- name: count
SELECT count(*), count(batch_id) FROM batchwright.ingest_request WHERE run_id = %(run_id)s AND error IS NULL

-- name: unsent
SELECT fingerprint, kind, model, count(*), extract(epoch FROM :now - min(created_at))::float8
FROM batchwright.ingest_request
WHERE run_id = %(run_id)s AND batch_id IS NULL AND error IS NULL
GROUP BY fingerprint, kind, model
ORDER BY 5 DESC

-- Whether some open item may still add requests soon: it is not waiting for a batch, or one of its steps is running.
-- name: is_busy
SELECT EXISTS (
    SELECT FROM batchwright.ingest_item AS item
    WHERE item.run_id = %(run_id)s AND item.status = 'OPEN' AND (
        SELECT coalesce(bool_or(step.waiting IS NULL), true) OR NOT bool_or(step.waiting ->> 'for' = 'batch')
        FROM batchwright.ingest_step AS step
        WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'open'))
    OR EXISTS (SELECT FROM batchwright.ingest_run WHERE id = %(run_id)s AND listed_at IS NULL)

-- name: batches
SELECT id, kind, extract(epoch FROM :now - began_at)::float8
FROM batchwright.ingest_call
WHERE run_id = %(run_id)s AND lane = 'batch' AND item_id IS NULL
ORDER BY began_at, id

-- Unsent requests that are not needed: their item has ended, or another item has got the answer meanwhile.
-- name: drop_needless
DELETE FROM batchwright.ingest_request AS request
WHERE request.run_id = %(run_id)s AND request.batch_id IS NULL AND request.error IS NULL AND (
    NOT EXISTS (
        SELECT FROM batchwright.ingest_item AS item WHERE item.id = request.item_id AND item.status = 'OPEN')
    OR EXISTS (
        SELECT FROM batchwright.ingest_answer AS answer
        WHERE (answer.tenant, answer.fingerprint, answer.hash) = (request.tenant, request.fingerprint, request.hash)))
RETURNING request.hash

-- name: drop_unsent
DELETE FROM batchwright.ingest_request
WHERE run_id = %(run_id)s AND batch_id IS NULL AND (%(models)s::text[] IS NULL OR model = ANY(%(models)s))
    AND (error IS NULL OR %(with_errors)s)
RETURNING hash

-- name: forget_errors
DELETE FROM batchwright.ingest_request
WHERE run_id = %(run_id)s AND batch_id IS NULL AND error IS NOT NULL
RETURNING hash

-- Planning: requests that were refused in a longer line come first, in lines of their own -----------------------------

-- name: take
SELECT hash, tokens, octet_length(input), pack, left_out
FROM batchwright.ingest_request
WHERE run_id = %(run_id)s AND tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND batch_id IS NULL AND error IS NULL
ORDER BY pack, left_out, created_at, hash
LIMIT %(limit)s
FOR NO KEY UPDATE

-- name: place
UPDATE batchwright.ingest_request AS request
SET batch_id = %(batch_id)s, line = given.line, place = given.place, left_out = given.left_out
FROM unnest(%(hashes)s::bytea[], %(lines)s::integer[], %(places)s::integer[], %(left_out)s::text[])
    AS given (hash, line, place, left_out)
WHERE request.tenant = %(tenant)s AND request.fingerprint = %(fingerprint)s AND request.hash = given.hash
    AND request.batch_id IS NULL
RETURNING request.hash

-- name: lines
SELECT line, hash, item_id, input, tokens, failures, left_out
FROM batchwright.ingest_request
WHERE batch_id = %(batch_id)s AND line >= %(first)s AND line < %(end)s
ORDER BY line, place

-- name: named_lines
SELECT line, hash, item_id, input, tokens, failures, left_out
FROM batchwright.ingest_request
WHERE batch_id = %(batch_id)s AND line = ANY(%(lines)s::integer[])
ORDER BY line, place

-- name: last_line
SELECT max(line) FROM batchwright.ingest_request WHERE batch_id = %(batch_id)s

-- name: next_lines
SELECT DISTINCT line FROM batchwright.ingest_request WHERE batch_id = %(batch_id)s ORDER BY line LIMIT %(limit)s

-- Settling ----------------------------------------------------------------------------------------------------------

-- name: lock_items
SELECT id FROM batchwright.ingest_item WHERE id = ANY(%(ids)s::text[]) ORDER BY id FOR NO KEY UPDATE

-- name: answered
DELETE FROM batchwright.ingest_request
WHERE tenant = %(tenant)s AND fingerprint = %(fingerprint)s AND hash = ANY(%(hashes)s::bytea[]) AND batch_id = %(batch_id)s
RETURNING hash

-- Takes requests out of the batch: they are resent, or have an error.
-- name: put_back
UPDATE batchwright.ingest_request AS request
SET batch_id = NULL, line = NULL, place = NULL, failures = given.failures, pack = coalesce(given.pack, request.pack),
    left_out = given.left_out, error = given.error
FROM unnest(
    %(hashes)s::bytea[], %(failures)s::integer[], %(packs)s::integer[], %(left_out)s::text[], %(errors)s::jsonb[])
    AS given (hash, failures, pack, left_out, error)
WHERE request.tenant = %(tenant)s AND request.fingerprint = %(fingerprint)s AND request.hash = given.hash
    AND request.batch_id = %(batch_id)s
RETURNING request.hash

-- name: charge_items
UPDATE batchwright.ingest_item AS item
SET cost = item.cost + given.cost, prompt_tokens = item.prompt_tokens + given.prompt_tokens,
    completion_tokens = item.completion_tokens + given.completion_tokens
FROM unnest(%(ids)s::text[], %(costs)s::numeric[], %(prompt_tokens)s::bigint[], %(completion_tokens)s::bigint[])
    AS given (id, cost, prompt_tokens, completion_tokens)
WHERE item.id = given.id
RETURNING item.id

-- The real cost of lines replaces their reservation, which shrinks in proportion to their estimated tokens.
-- name: settle
WITH call AS (
    SELECT id, tokens, cost FROM batchwright.ingest_call WHERE id = %(batch_id)s FOR NO KEY UPDATE
),
freed AS (
    SELECT id, CASE WHEN tokens <= %(tokens)s THEN coalesce(cost, 0)
                    ELSE round(coalesce(cost, 0) * %(tokens)s / tokens, 12) END AS cost
    FROM call
),
shrunk AS (
    UPDATE batchwright.ingest_call AS call SET tokens = greatest(0, call.tokens - %(tokens)s), cost = call.cost - freed.cost
    FROM freed WHERE call.id = freed.id
)
UPDATE batchwright.ingest_run AS run SET
    reserved = greatest(0, run.reserved - coalesce((SELECT cost FROM freed), 0)),
    spent = run.spent + %(cost)s,
    has_unknown_cost = run.has_unknown_cost OR %(is_unknown)s,
    prompt_tokens = run.prompt_tokens + %(prompt_tokens)s,
    completion_tokens = run.completion_tokens + %(completion_tokens)s,
    calls = run.calls + %(calls)s
WHERE run.id = %(run_id)s
RETURNING run.id

-- A fully settled batch has nothing reserved.
-- name: close
WITH gone AS (
    DELETE FROM batchwright.ingest_call AS call
    WHERE call.id = %(batch_id)s
        AND NOT EXISTS (SELECT FROM batchwright.ingest_request AS request WHERE request.batch_id = %(batch_id)s)
    RETURNING call.run_id, coalesce(call.cost, 0) AS cost
)
UPDATE batchwright.ingest_run AS run SET reserved = greatest(0, run.reserved - gone.cost)
FROM gone WHERE run.id = gone.run_id
RETURNING run.id

-- Wakes items that wait for a batch although none of their requests is open.
-- name: wake
WITH ready AS (
    SELECT item.id, item.generation, item.job_ids[cardinality(item.job_ids)] AS job_id
    FROM batchwright.ingest_item AS item
    WHERE item.run_id = %(run_id)s AND item.status = 'OPEN'
        AND EXISTS (
            SELECT FROM batchwright.ingest_step AS step
            WHERE step.item_id = item.id AND step.generation = item.generation AND step.state = 'open'
                AND step.waiting ->> 'for' = 'batch')
        AND NOT EXISTS (
            SELECT FROM batchwright.ingest_request AS request
            WHERE request.item_id = item.id AND request.error IS NULL)
    ORDER BY item.id
    LIMIT %(limit)s
)
UPDATE batchwright.ingest_step AS step SET not_before = NULL, waiting = NULL
FROM ready
WHERE step.item_id = ready.id AND step.generation = ready.generation AND step.state = 'open'
    AND step.waiting ->> 'for' = 'batch'
RETURNING ready.job_id
