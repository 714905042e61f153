-- Batches: every move is a compare-and-set, and the order to stop is a column that workers read.

-- part: columns
id, tenant, status::text, job_id, queue, priority, endpoint, input_file_id, completion_window, output_expires_seconds,
metadata, limits, traceparent, retry_of, retry_codes, family, models, total, input_sha256, errors, completed, failed,
expired, cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, usage_by_model, error_summary,
resends, overflow_cost, stop_reason, stop_at, stop_error, output_file_id, error_file_id, manifest, segments_gone_at, created_at,
expires_at, paused_at, taken_up_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
cancelled_at, waiting_reason, waiting_message,
coalesce(waiting_at > :now - make_interval(mins => 2), false)

-- part: open
batch.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- What is known of a batch that ends. Counts and errors that are null stay as they are.
-- part: ending
completed = coalesce(%(completed)s, completed),
failed = coalesce(%(failed)s, failed),
expired = coalesce(%(expired)s, expired),
cancelled = coalesce(%(cancelled)s, cancelled),
error_summary = coalesce(%(error_summary)s::jsonb, error_summary),
errors = coalesce(%(errors)s::jsonb, errors),
output_file_id = %(output_file_id)s,
error_file_id = %(error_file_id)s,
manifest = %(manifest)s::jsonb

-- name: insert
INSERT INTO batchwright.batch (
    id, tenant, job_id, queue, priority, endpoint, input_file_id, completion_window, output_expires_seconds, metadata,
    limits, idempotency_key, idempotency_digest, traceparent, retry_of, retry_codes, family, sealed_headers, created_at,
    expires_at)
VALUES (
    %(id)s, %(tenant)s, %(job_id)s, %(queue)s, %(priority)s, %(endpoint)s, %(input_file_id)s, %(completion_window)s,
    %(output_expires_seconds)s, %(metadata)s::jsonb, %(limits)s::jsonb, %(idempotency_key)s, %(idempotency_digest)s,
    %(traceparent)s, %(retry_of)s, %(retry_codes)s, %(family)s,
    coalesce(%(sealed_headers)s::bytea, (SELECT sealed_headers FROM batchwright.batch AS first WHERE first.id = %(retry_of)s)),
    :now, :now + make_interval(secs => %(window_seconds)s))
ON CONFLICT DO NOTHING
RETURNING :columns

-- The batch that stood in the way: the same one, made by a call whose answer was lost, or the one that has the key.
-- name: known
SELECT idempotency_digest, :columns
FROM batchwright.batch
WHERE id = %(id)s OR (tenant = %(tenant)s AND idempotency_key = %(idempotency_key)s)
ORDER BY id <> %(id)s
LIMIT 1

-- Of an ended batch: from now on the key can stand for another one.
-- name: free_idempotency_key
UPDATE batchwright.batch SET idempotency_key = NULL, idempotency_digest = NULL
WHERE id = %(id)s AND status IN ('completed', 'failed', 'expired', 'cancelled')
RETURNING id

-- name: get
SELECT :columns FROM batchwright.batch WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant)

-- name: sealed_headers
SELECT sealed_headers FROM batchwright.batch WHERE id = %(id)s

-- name: lock
SELECT :columns FROM batchwright.batch WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant) FOR NO KEY UPDATE

-- By tenant and id, said in a way that only the index of both can follow: along the ids alone, a tenant with few
-- batches would have to walk past everybody else's.
-- name: list
SELECT :columns
FROM batchwright.batch
WHERE (tenant, id) < (%(tenant)s, coalesce(%(after)s, 'c')) AND tenant >= %(tenant)s
ORDER BY tenant DESC, id DESC
LIMIT %(limit)s

-- name: list_everywhere
SELECT :columns
FROM batchwright.batch
WHERE id < coalesce(%(after)s, 'c') COLLATE "C"
ORDER BY id DESC
LIMIT %(limit)s

-- By status, the newest of each and of each tenant: `list` would walk past all others to find a few. Said in a way that
-- only the index of all three can follow.
-- name: list_by_status
WITH RECURSIVE known AS (
    (SELECT one.tenant FROM batchwright.batch AS one WHERE %(tenant)s::text IS NULL ORDER BY one.tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT next.tenant FROM batchwright.batch AS next WHERE next.tenant > known.tenant ORDER BY next.tenant LIMIT 1)
    FROM known WHERE known.tenant IS NOT NULL
),
wanted AS (
    SELECT whose.tenant, status::batchwright.batch_status AS status
    FROM (SELECT tenant FROM known UNION ALL SELECT %(tenant)s::text) AS whose, unnest(%(statuses)s::text[]) AS status
    WHERE whose.tenant IS NOT NULL
)
SELECT :columns
FROM batchwright.batch
WHERE id = ANY(ARRAY(
    SELECT newest.id
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT one.id FROM batchwright.batch AS one
        WHERE (one.tenant, one.status, one.id) < (wanted.tenant, wanted.status, coalesce(%(after)s, 'c'))
            AND (one.tenant, one.status) >= (wanted.tenant, wanted.status)
        ORDER BY one.tenant DESC, one.status DESC, one.id DESC
        LIMIT %(limit)s
    ) AS newest
    ORDER BY newest.id DESC
    LIMIT %(limit)s))
ORDER BY id DESC

-- How many lines were registered since when: of late, but never more than the newest segments, however many a batch
-- has. The oldest of a full house only says when, because nobody knows how long its lines had taken.
-- name: paces
SELECT id, coalesce(sum(lines) FILTER (WHERE registered_at > since), 0)::bigint,
    extract(epoch FROM :now - since)::float8, :now
FROM (
    SELECT batch.id, recent.lines, recent.registered_at,
        greatest(
            :now - make_interval(secs => %(seconds)s), batch.in_progress_at,
            CASE count(recent.lines) OVER of_batch WHEN %(segments)s THEN min(recent.registered_at) OVER of_batch END
        ) AS since
    FROM batchwright.batch
    LEFT JOIN LATERAL (
        SELECT lines, registered_at FROM batchwright.batch_segment
        WHERE batch_id = batch.id
        ORDER BY batch_segment.id DESC
        LIMIT %(segments)s
    ) AS recent ON true
    WHERE batch.id = ANY(%(ids)s)
    WINDOW of_batch AS (PARTITION BY batch.id)
) AS newest
GROUP BY id, since

-- When a worker first came to it, and whether that was too late.
-- name: pick_up
UPDATE batchwright.batch SET taken_up_at = coalesce(taken_up_at, :now)
WHERE id = %(id)s AND status = 'validating'
RETURNING :columns, expires_at <= :now

-- name: begin
UPDATE batchwright.batch
SET status = 'in_progress', in_progress_at = :now, total = %(total)s, models = %(models)s,
    input_sha256 = %(input_sha256)s, waiting_reason = NULL, waiting_message = NULL, waiting_at = NULL
WHERE id = %(id)s AND status = 'validating'
RETURNING :columns

-- name: finalize
UPDATE batchwright.batch SET status = 'finalizing', finalizing_at = :now
WHERE id = %(id)s AND status = 'in_progress' AND stop_reason IS NULL
RETURNING :columns

-- Lines have no answer although every shard is done: they are sent again, and only so often.
-- name: resend
UPDATE batchwright.batch SET status = 'in_progress', finalizing_at = NULL, resends = resends + 1
WHERE id = %(id)s AND status = 'finalizing' AND resends < %(resends_max)s
RETURNING resends

-- What keeps it waiting, and whether it may go on waiting: until its window is over, and for an hour at least after
-- everything was asked or it was told to stop.
-- name: note_wait
UPDATE batchwright.batch SET waiting_reason = %(reason)s, waiting_message = %(message)s, waiting_at = :now
WHERE id = %(id)s AND :open
RETURNING :now < greatest(
    expires_at, coalesce(finalizing_at, stop_at, cancelling_at, :now) + make_interval(secs => %(patience_seconds)s))

-- name: complete
UPDATE batchwright.batch SET status = 'completed', completed_at = :now, :ending
WHERE id = %(id)s AND status = 'finalizing'
RETURNING status::text

-- name: fail
UPDATE batchwright.batch SET status = 'failed', failed_at = :now, :ending
WHERE id = %(id)s AND :open
RETURNING status::text

-- name: expire
UPDATE batchwright.batch SET status = 'expired', expired_at = :now, :ending
WHERE id = %(id)s AND status IN ('validating', 'in_progress')
RETURNING status::text

-- By the database's clock, and only before a worker has planned it.
-- name: expire_unstarted
UPDATE batchwright.batch SET status = 'expired', expired_at = :now
WHERE id = %(id)s AND status = 'validating' AND expires_at <= :now
RETURNING id

-- The cancellation may have come after this transaction began.
-- name: end_cancelled
UPDATE batchwright.batch SET status = 'cancelled', cancelled_at = greatest(:now, cancelling_at), :ending
WHERE id = %(id)s AND status = 'cancelling'
RETURNING status::text

-- Of a batch that ended without its files, or whose files lack answers that were found since.
-- name: repair
UPDATE batchwright.batch
SET completed = %(completed)s, failed = %(failed)s, expired = %(expired)s, cancelled = %(cancelled)s,
    error_summary = %(error_summary)s::jsonb, output_file_id = %(output_file_id)s, error_file_id = %(error_file_id)s,
    manifest = %(manifest)s::jsonb
WHERE id = %(id)s AND status IN ('failed', 'expired', 'cancelled') AND segments_gone_at IS NULL
    AND manifest IS NOT DISTINCT FROM %(manifest_before)s::jsonb
RETURNING id

-- What was stopping already because of an error has its requests in flight no longer than the grace from now on.
-- name: cancel
UPDATE batchwright.batch
SET status = 'cancelling', cancelling_at = :now, paused_at = NULL,
    stop_reason = CASE WHEN status = 'in_progress' AND stop_reason IS DISTINCT FROM 'deadline' THEN 'cancel'
                       ELSE stop_reason END,
    stop_at = CASE WHEN status = 'in_progress' AND stop_reason IS DISTINCT FROM 'deadline' THEN :now ELSE stop_at END
WHERE id = %(id)s AND status IN ('validating', 'in_progress', 'finalizing')
RETURNING :columns

-- name: stop
UPDATE batchwright.batch
SET stop_reason = %(reason)s, stop_at = :now, stop_error = %(error)s::jsonb
WHERE id = %(id)s AND status = 'in_progress' AND stop_reason IS NULL
RETURNING job_id

-- Shards that go to a provider because the batch would be late: all of them together may cost so much.
-- name: spend_on_overflow
UPDATE batchwright.batch SET overflow_cost = overflow_cost + %(cost)s
WHERE id = %(id)s AND status = 'in_progress' AND stop_reason IS NULL AND overflow_cost + %(cost)s <= %(cost_max)s
RETURNING overflow_cost

-- name: pause
UPDATE batchwright.batch SET paused_at = coalesce(paused_at, :now) WHERE id = %(id)s RETURNING :columns

-- name: resume
UPDATE batchwright.batch SET paused_at = NULL WHERE id = %(id)s RETURNING :columns

-- name: set_priority
UPDATE batchwright.batch SET priority = %(priority)s WHERE id = %(id)s RETURNING :columns

-- name: set_limits
UPDATE batchwright.batch SET limits = %(limits)s::jsonb WHERE id = %(id)s RETURNING :columns

-- The private queue of a batch, and those of its shards, once no open batch has it: nobody will ask for them again.
-- name: forget_queue
DELETE FROM batchwright.queue
WHERE (name = %(queue)s OR starts_with(name, %(queue)s || '/'))
    AND NOT EXISTS (
        SELECT FROM batchwright.batch WHERE batch.queue = %(queue)s AND :open)
RETURNING name

-- The queues of shards that workers claim from, or did until a moment ago: they may only be restarting. A queue that
-- ends in a slash stands for all below it.
-- name: served
SELECT DISTINCT served.queue
FROM batchwright.worker
CROSS JOIN unnest(on_demand_queues) AS served (queue)
WHERE %(shard)s = ANY(on_demand_types) AND strpos(served.queue, %(below)s) > 0
    AND heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)

-- What the workers' dispatchers must know of the batches that they work for.
-- name: controls
SELECT id, status::text, stop_reason, extract(epoch FROM :now - stop_at)::float8,
    extract(epoch FROM :now - paused_at)::float8, priority, limits, total, completed + failed + expired + cancelled,
    extract(epoch FROM expires_at - :now)::float8, job_id
FROM batchwright.batch
WHERE id = ANY(%(ids)s)

-- Batches that somebody must look after: the window is over, the order to stop was not followed, or the job is gone.
-- name: stalled
SELECT batch.id, batch.status::text, batch.stop_reason, extract(epoch FROM :now - batch.stop_at)::float8,
    extract(epoch FROM :now - batch.expires_at)::float8, job.status, batch.job_id, batch.tenant,
    batch.expires_at
FROM batchwright.batch
LEFT JOIN :jobs AS job ON job.id = batch.job_id
WHERE :open
    AND (batch.expires_at, batch.id) > (%(after_time)s::timestamptz, %(after_id)s)
    AND (
        (batch.expires_at <= :now AND batch.status IN ('validating', 'in_progress'))
        OR batch.stop_reason IS NOT NULL
        OR job.is_open IS NOT TRUE)
ORDER BY batch.expires_at, batch.id
LIMIT %(limit)s

-- Registering: the claims are locked first, then the batches, then the rows are inserted, whose ids therefore grow in
-- commit order in a batch.
-- name: lock_sums
SELECT id, usage_by_model, error_summary FROM batchwright.batch WHERE id = ANY(%(ids)s) ORDER BY id FOR NO KEY UPDATE

-- A range is taken only if it begins where the one before it in its journal ends. After a failover that lost commits
-- the one before may be gone; a range behind a gap would hide what was lost.
-- name: insert_segments
INSERT INTO batchwright.batch_segment (
    batch_id, shard, claim, seq, host, key, start_byte, end_byte, lines, tally, registered_at)
SELECT batch_id, shard, claim, seq, host, key, start_byte, end_byte, lines, tally, :now
FROM jsonb_to_recordset(%(segments)s::jsonb) AS one (
    place integer, batch_id text, shard integer, claim bigint, seq integer, host text, key text, start_byte bigint,
    end_byte bigint, lines integer, tally jsonb)
WHERE (seq = 0 AND start_byte = 0) OR (
    SELECT end_byte FROM batchwright.batch_segment AS before
    WHERE (before.batch_id, before.shard, before.claim, before.seq) = (one.batch_id, one.shard, one.claim, one.seq - 1)
) = start_byte
ORDER BY place
ON CONFLICT (batch_id, shard, claim, seq) DO NOTHING
RETURNING batch_id, shard, claim, seq

-- How far these journals are registered, and whether these very ranges are.
-- name: positions
SELECT one.batch_id, one.shard, one.claim, one.seq, last.seq, last.end_byte, EXISTS (
    SELECT FROM batchwright.batch_segment AS same
    WHERE (same.batch_id, same.shard, same.claim, same.seq) = (one.batch_id, one.shard, one.claim, one.seq)
        AND (same.host, same.start_byte, same.end_byte) = (one.host, one.start_byte, one.end_byte))
FROM jsonb_to_recordset(%(segments)s::jsonb) AS one (
    batch_id text, shard integer, claim bigint, seq integer, host text, start_byte bigint, end_byte bigint)
CROSS JOIN LATERAL (
    SELECT seq, end_byte FROM batchwright.batch_segment
    WHERE (batch_id, shard, claim) = (one.batch_id, one.shard, one.claim)
    ORDER BY seq DESC
    LIMIT 1
) AS last

-- name: add_sums
UPDATE batchwright.batch
SET completed = batch.completed + one.completed, failed = batch.failed + one.failed,
    expired = batch.expired + one.expired, cancelled = batch.cancelled + one.cancelled,
    input_tokens = batch.input_tokens + one.input_tokens, cached_tokens = batch.cached_tokens + one.cached_tokens,
    output_tokens = batch.output_tokens + one.output_tokens,
    reasoning_tokens = batch.reasoning_tokens + one.reasoning_tokens,
    usage_by_model = one.usage_by_model, error_summary = one.error_summary
FROM jsonb_to_recordset(%(sums)s::jsonb) AS one (
    id text, completed bigint, failed bigint, expired bigint, cancelled bigint, input_tokens bigint,
    cached_tokens bigint, output_tokens bigint, reasoning_tokens bigint, usage_by_model jsonb, error_summary jsonb)
WHERE batch.id = one.id

-- name: segments
SELECT id, batch_id, shard, claim, seq, host, key, start_byte, end_byte, lines
FROM batchwright.batch_segment
WHERE batch_id = %(batch_id)s AND (%(shard)s::integer IS NULL OR shard = %(shard)s) AND id > %(after)s
ORDER BY id
LIMIT %(limit)s
