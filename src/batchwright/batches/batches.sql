-- Batches: every transition is a compare-and-set, and the order to stop is a column that workers read.

-- part: columns
id, tenant, status::text, job_id, queue, priority, endpoint, input_file_id, completion_window, output_expires_seconds,
metadata, limits, traceparent, retry_of, retry_codes, family, models, total, input_sha256, errors, completed, failed,
expired, cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, usage_by_model, progress_by_model,
error_summary, resends, overflow_cost, stop_reason, stop_at, stop_error, output_file_id, error_file_id, manifest, segments_gone_at, created_at,
expires_at, paused_at, taken_up_at, in_progress_at, finalizing_at, completed_at, failed_at, expired_at, cancelling_at,
cancelled_at, waiting_reason, waiting_message, origin,
coalesce(waiting_at > :now - make_interval(mins => 2), false)

-- part: open
batch.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- The columns that are set when a batch ends. Counts and errors that are null stay unchanged.
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
    limits, idempotency_key, idempotency_digest, traceparent, retry_of, retry_codes, family, origin, sealed_headers,
    created_at, expires_at)
VALUES (
    %(id)s, %(tenant)s, %(job_id)s, %(queue)s, %(priority)s, %(endpoint)s, %(input_file_id)s, %(completion_window)s,
    %(output_expires_seconds)s, %(metadata)s::jsonb, %(limits)s::jsonb, %(idempotency_key)s, %(idempotency_digest)s,
    %(traceparent)s, %(retry_of)s, %(retry_codes)s, %(family)s, %(origin)s::jsonb,
    coalesce(%(sealed_headers)s::bytea, (SELECT sealed_headers FROM batchwright.batch AS first WHERE first.id = %(retry_of)s)),
    :now, :now + make_interval(secs => %(window_seconds)s))
ON CONFLICT DO NOTHING
RETURNING :columns

-- The batch that the insert conflicts with: the same one, from a call whose answer was lost, or the one with the key.
-- name: known
SELECT idempotency_digest, :columns
FROM batchwright.batch
WHERE id = %(id)s OR (tenant = %(tenant)s AND idempotency_key = %(idempotency_key)s)
ORDER BY id <> %(id)s
LIMIT 1

-- For an ended batch: from now on the key can identify another one.
-- name: free_idempotency_key
UPDATE batchwright.batch SET idempotency_key = NULL, idempotency_digest = NULL
WHERE id = %(id)s AND status IN ('completed', 'failed', 'expired', 'cancelled')
RETURNING id

-- name: get
SELECT :columns FROM batchwright.batch WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant)

-- Runs of one file that have not ended; few batches are open, and they have an index of their own.
-- name: unfinished
SELECT :columns
FROM batchwright.batch
WHERE :open AND batch.origin ->> 'file' = %(file)s
ORDER BY id DESC
LIMIT %(limit)s

-- name: sealed_headers
SELECT sealed_headers FROM batchwright.batch WHERE id = %(id)s

-- name: lock
SELECT :columns FROM batchwright.batch WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant) FOR NO KEY UPDATE

-- By tenant and id, written so that only the index of both fits. With the index of ids alone, the list of a tenant with
-- few batches would scan those of all others.
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

-- The newest batches by tenant and status: `list` would scan all others to find a few. Written so that only the index
-- of tenant, status and id fits.
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

-- How many lines were registered recently, and in how many seconds. Only the newest segments are read, however many a
-- batch has. If there are more, the oldest of those read only marks the start, because it is unknown how long its lines
-- took. Time before the oldest live worker started does not count: no worker ran the batch then. The last column is the
-- time since the last answer.
-- name: paces
SELECT id, coalesce(sum(lines) FILTER (WHERE registered_at > since), 0)::bigint,
    extract(epoch FROM :now - since)::float8, :now,
    extract(epoch FROM :now - greatest(max(registered_at), began_at))::float8
FROM (
    SELECT batch.id, recent.lines, recent.registered_at, staffed.began_at,
        greatest(
            :now - make_interval(secs => %(seconds)s), staffed.began_at,
            CASE count(recent.lines) OVER of_batch WHEN %(segments)s THEN min(recent.registered_at) OVER of_batch END
        ) AS since
    FROM batchwright.batch
    CROSS JOIN LATERAL (
        SELECT greatest(batch.in_progress_at, min(worker.started_at)) AS began_at
        FROM batchwright.worker
        WHERE (worker.queues IS NULL OR batch.queue = ANY(worker.queues))
            AND worker.heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
    ) AS staffed
    LEFT JOIN LATERAL (
        SELECT lines, registered_at FROM batchwright.batch_segment
        WHERE batch_id = batch.id
        ORDER BY batch_segment.id DESC
        LIMIT %(segments)s
    ) AS recent ON true
    WHERE batch.id = ANY(%(ids)s)
    WINDOW of_batch AS (PARTITION BY batch.id)
) AS newest
GROUP BY id, since, began_at

-- Sets when a worker first picked up the batch; the last column says whether its window had ended by then.
-- name: pick_up
UPDATE batchwright.batch SET taken_up_at = coalesce(taken_up_at, :now)
WHERE id = %(id)s AND status = 'validating'
RETURNING :columns, expires_at <= :now

-- name: begin
UPDATE batchwright.batch
SET status = 'in_progress', in_progress_at = :now, total = %(total)s, models = %(models)s,
    input_sha256 = %(input_sha256)s, progress_by_model = %(progress)s::jsonb, waiting_reason = NULL, waiting_message = NULL, waiting_at = NULL
WHERE id = %(id)s AND status = 'validating'
RETURNING :columns

-- name: finalize
UPDATE batchwright.batch SET status = 'finalizing', finalizing_at = :now
WHERE id = %(id)s AND status = 'in_progress' AND stop_reason IS NULL
RETURNING :columns

-- Lines have no answer although every shard is done: they are resent, a limited number of times.
-- name: resend
UPDATE batchwright.batch SET status = 'in_progress', finalizing_at = NULL, resends = resends + 1
WHERE id = %(id)s AND status = 'finalizing' AND resends < %(resends_max)s
RETURNING resends

-- Stores why the batch waits; returns whether it may keep waiting: until its window ends, and for at least an hour after
-- all requests were sent or it was ordered to stop.
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

-- For a batch that ended without its files, or whose files lack answers that were found since.
-- name: repair
UPDATE batchwright.batch
SET completed = %(completed)s, failed = %(failed)s, expired = %(expired)s, cancelled = %(cancelled)s,
    error_summary = %(error_summary)s::jsonb, output_file_id = %(output_file_id)s, error_file_id = %(error_file_id)s,
    manifest = %(manifest)s::jsonb
WHERE id = %(id)s AND status IN ('failed', 'expired', 'cancelled') AND segments_gone_at IS NULL
    AND manifest IS NOT DISTINCT FROM %(manifest_before)s::jsonb
RETURNING id

-- If the batch was already stopping because of an error, its requests in flight get the grace period of a cancellation.
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

-- Adds the cost of a shard that goes to a provider because the batch would be late; no row if the total is too high.
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

-- Removes the private queue of a batch and the queues of its shards, unless an open batch uses them.
-- name: forget_queue
DELETE FROM batchwright.queue
WHERE (name = %(queue)s OR starts_with(name, %(queue)s || '/'))
    AND NOT EXISTS (
        SELECT FROM batchwright.batch WHERE batch.queue = %(queue)s AND :open)
RETURNING name

-- Tokens of today (UTC) by tenant and model, of batches that are open or ended today. For a batch that began earlier,
-- the samples of today are summed. Batches that were created for documents are left out: their cost is counted there.
-- name: used_today
WITH today AS MATERIALIZED (SELECT date_trunc('day', :now AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS began),
busy AS MATERIALIZED (
    SELECT batch.id, batch.tenant, batch.in_progress_at >= (SELECT began FROM today) AS is_new, batch.usage_by_model,
        batch.metadata
    FROM batchwright.batch
    WHERE :open AND batch.in_progress_at IS NOT NULL
    UNION ALL
    (SELECT batch.id, batch.tenant, batch.in_progress_at >= (SELECT began FROM today), batch.usage_by_model,
        batch.metadata
    FROM batchwright.batch
    WHERE leftovers_gone_at IS NULL AND batch.in_progress_at IS NOT NULL
        AND coalesce(completed_at, failed_at, expired_at, cancelled_at) >= (SELECT began FROM today)
    LIMIT %(limit)s)
    UNION ALL
    (SELECT batch.id, batch.tenant, batch.in_progress_at >= (SELECT began FROM today), batch.usage_by_model,
        batch.metadata
    FROM batchwright.batch
    WHERE leftovers_gone_at IS NOT NULL AND batch.in_progress_at IS NOT NULL
        AND coalesce(completed_at, failed_at, expired_at, cancelled_at) >= (SELECT began FROM today)
    LIMIT %(limit)s)
),
used AS (
    SELECT busy.tenant, usage.key AS model, (usage.value ->> 'input')::bigint AS input,
        (usage.value ->> 'cached')::bigint AS cached, (usage.value ->> 'output')::bigint AS output,
        (busy.metadata ->> 'ingest_run') IS NOT NULL AS is_of_documents
    FROM busy
    CROSS JOIN LATERAL jsonb_each(busy.usage_by_model) AS usage
    WHERE busy.is_new
    UNION ALL
    SELECT busy.tenant, sample.model, sample.input_tokens, sample.cached_tokens, sample.output_tokens,
        (busy.metadata ->> 'ingest_run') IS NOT NULL
    FROM busy
    JOIN batchwright.batch_sample AS sample ON sample.batch_id = busy.id
    WHERE NOT busy.is_new AND sample.at >= (SELECT began FROM today)
)
SELECT tenant, model, sum(input)::bigint, sum(cached)::bigint, sum(output)::bigint
FROM used
WHERE NOT is_of_documents AND tenant = coalesce(%(tenant)s, tenant)
GROUP BY tenant, model
ORDER BY 1, 2

-- The queues of shards that workers claim from, or did until recently: those workers may be restarting. A name that ends
-- in a slash means all queues below it.
-- name: served
SELECT DISTINCT served.queue
FROM batchwright.worker
CROSS JOIN unnest(on_demand_queues) AS served (queue)
WHERE %(shard)s = ANY(on_demand_types) AND strpos(served.queue, %(below)s) > 0
    AND heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)

-- What a worker must know about the batches whose requests it sends.
-- name: controls
SELECT id, status::text, stop_reason, extract(epoch FROM :now - stop_at)::float8,
    extract(epoch FROM :now - paused_at)::float8, priority, limits, total, completed + failed + expired + cancelled,
    extract(epoch FROM expires_at - :now)::float8, job_id
FROM batchwright.batch
WHERE id = ANY(%(ids)s)

-- Batches that need the watchdog: the window has ended, the order to stop was not followed, or the job is gone.
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

-- A registration locks the claims first, then the batches, and then inserts the rows. So within a batch, the ids of rows
-- grow in commit order.
-- name: lock_sums
SELECT id, usage_by_model, error_summary, progress_by_model
FROM batchwright.batch WHERE id = ANY(%(ids)s) ORDER BY id FOR NO KEY UPDATE

-- A range is inserted only if it begins where the previous range of its journal ends. After a failover that lost commits
-- the previous range may be gone; a range after a gap would hide what was lost.
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

-- How far these journals are registered, and whether exactly these ranges are.
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

-- Adds new registrations to the batch, and to samples by time, from which its progress is charted. Steps grow from two
-- seconds at first to an hour after some days, so that no batch has many. A small and quick batch gets no samples.
-- name: add_sums
WITH sampled AS (
    INSERT INTO batchwright.batch_sample AS sample (
        batch_id, model, at, seconds, completed, failed, input_tokens, cached_tokens, output_tokens, load)
    SELECT batch.id, new.model,
        batch.in_progress_at + make_interval(secs => floor(age.seconds / step.seconds) * step.seconds), step.seconds,
        new.completed, new.failed, new.input_tokens, new.cached_tokens, new.output_tokens, new.load
    FROM jsonb_to_recordset(%(samples)s::jsonb) AS new (
        id text, model text, completed bigint, failed bigint, input_tokens bigint, cached_tokens bigint,
        output_tokens bigint, load jsonb)
    JOIN batchwright.batch ON batch.id = new.id
    CROSS JOIN LATERAL (
        SELECT greatest(0, extract(epoch FROM :now - batch.in_progress_at))::float8 AS seconds
    ) AS age
    CROSS JOIN LATERAL (
        SELECT CASE WHEN age.seconds < 120 THEN 2 WHEN age.seconds < 3600 THEN 10 WHEN age.seconds < 21600 THEN 60
            WHEN age.seconds < 259200 THEN 600 ELSE 3600 END AS seconds
    ) AS step
    WHERE batch.in_progress_at IS NOT NULL AND (batch.total > %(small_max)s OR age.seconds >= 10)
    ON CONFLICT (batch_id, at, model) DO UPDATE SET
        completed = sample.completed + excluded.completed, failed = sample.failed + excluded.failed,
        input_tokens = sample.input_tokens + excluded.input_tokens,
        cached_tokens = sample.cached_tokens + excluded.cached_tokens,
        output_tokens = sample.output_tokens + excluded.output_tokens, load = sample.load || excluded.load
)
UPDATE batchwright.batch
SET completed = batch.completed + one.completed, failed = batch.failed + one.failed,
    expired = batch.expired + one.expired, cancelled = batch.cancelled + one.cancelled,
    input_tokens = batch.input_tokens + one.input_tokens, cached_tokens = batch.cached_tokens + one.cached_tokens,
    output_tokens = batch.output_tokens + one.output_tokens,
    reasoning_tokens = batch.reasoning_tokens + one.reasoning_tokens,
    usage_by_model = one.usage_by_model, progress_by_model = one.progress_by_model,
    error_summary = one.error_summary
FROM jsonb_to_recordset(%(sums)s::jsonb) AS one (
    id text, completed bigint, failed bigint, expired bigint, cancelled bigint, input_tokens bigint,
    cached_tokens bigint, output_tokens bigint, reasoning_tokens bigint, usage_by_model jsonb, progress_by_model jsonb,
    error_summary jsonb)
WHERE batch.id = one.id

-- name: segments
SELECT id, batch_id, shard, claim, seq, host, key, start_byte, end_byte, lines
FROM batchwright.batch_segment
WHERE batch_id = %(batch_id)s AND (%(shard)s::integer IS NULL OR shard = %(shard)s) AND id > %(after)s
ORDER BY id
LIMIT %(limit)s
