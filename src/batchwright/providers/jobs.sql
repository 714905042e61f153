-- Jobs at providers. A writer holds the claim of the job that runs them: the caller locks it first.

-- part: columns
key, owner, number, provider, model, input_ids, phase, staged, external_id, extra, strangers, document, raw_status, total,
succeeded, failed, failures, cancelled, error, results_key, input_tokens, output_tokens, audio_seconds, cost, created_at,
submitting_at, submitted_at, ended_at, cleaned_at,
extract(epoch FROM next_at - :now)::float8,
extract(epoch FROM :now - doubtful_at)::float8,
extract(epoch FROM :now - stopping_at)::float8

-- name: add
INSERT INTO batchwright.provider_job (key, owner, number, provider, model, input_ids, created_at, next_at)
SELECT one.key, %(owner)s, one.number, one.provider, one.model, ARRAY(SELECT jsonb_array_elements_text(one.input_ids)),
    :now, :now
FROM jsonb_to_recordset(%(jobs)s::jsonb) AS one (key text, number integer, provider text, model text, input_ids jsonb)
ON CONFLICT (owner, number) DO NOTHING
RETURNING key

-- name: of_owner
SELECT :columns FROM batchwright.provider_job WHERE owner = %(owner)s ORDER BY number

-- name: save_staged
UPDATE batchwright.provider_job SET staged = %(staged)s::jsonb, failures = 0
WHERE key = %(key)s AND phase = 'planned'
RETURNING :columns

-- name: end_staging
UPDATE batchwright.provider_job SET phase = 'staged', failures = 0
WHERE key = %(key)s AND phase = 'planned'
RETURNING :columns

-- If a provider has no marker, only one submission at a time may be in doubt; the oldest goes first.
-- name: begin_submit
UPDATE batchwright.provider_job SET
    phase = 'submitting', submitting_at = coalesce(submitting_at, :now), doubtful_at = NULL
WHERE key = %(key)s AND phase IN ('staged', 'submitting') AND (NOT %(is_alone)s OR NOT EXISTS (
    SELECT FROM batchwright.provider_job AS other
    WHERE other.provider = provider_job.provider AND other.phase = 'submitting' AND other.key <> %(key)s
        AND (provider_job.phase = 'staged'
            OR (other.submitting_at, other.key) < (provider_job.submitting_at, provider_job.key))))
RETURNING :columns

-- No worker is sending the job now.
-- name: begin_doubt
UPDATE batchwright.provider_job SET doubtful_at = coalesce(doubtful_at, :now)
WHERE key = %(key)s AND phase = 'submitting'
RETURNING :columns

-- name: begin_stop
UPDATE batchwright.provider_job SET stopping_at = coalesce(stopping_at, :now)
WHERE key = %(key)s AND phase <> 'ended'
RETURNING :columns

-- name: lock_provider
SELECT pg_advisory_xact_lock(hashtextextended('batchwright.provider:' || %(provider)s, 0))

-- The provider has not accepted the job.
-- name: withdraw
UPDATE batchwright.provider_job SET phase = 'staged', submitting_at = NULL, doubtful_at = NULL
WHERE key = %(key)s AND phase = 'submitting'
RETURNING :columns

-- name: refer
UPDATE batchwright.provider_job SET
    phase = 'submitted', external_id = %(external_id)s, extra = %(extra)s::jsonb, document = %(document)s::jsonb,
    submitted_at = :now, failures = 0, next_at = :now + make_interval(secs => %(seconds)s)
WHERE key = %(key)s AND phase = 'submitting'
RETURNING :columns

-- The adopted job belongs to another task.
-- name: disown
UPDATE batchwright.provider_job SET
    phase = 'submitting', strangers = array_append(strangers, external_id), external_id = NULL, extra = '{}',
    submitted_at = NULL
WHERE key = %(key)s AND phase = 'submitted'
RETURNING :columns

-- name: others
SELECT external_id FROM batchwright.provider_job
WHERE provider = %(provider)s AND external_id = ANY(%(external_ids)s) AND key <> %(key)s

-- name: note
UPDATE batchwright.provider_job SET
    next_at = :now + make_interval(secs => %(seconds)s), failures = %(failures)s,
    raw_status = coalesce(%(raw_status)s, raw_status), document = coalesce(%(document)s::jsonb, document),
    extra = extra || coalesce(%(extra)s::jsonb, '{}'),
    total = coalesce(%(total)s, total), succeeded = coalesce(%(succeeded)s, succeeded),
    failed = coalesce(%(failed)s, failed)
WHERE key = %(key)s AND phase <> 'ended'
RETURNING :columns

-- name: note_cancel
-- The next poll is due immediately: the job may have ended meanwhile.
UPDATE batchwright.provider_job SET cancelled = %(cancelled)s, next_at = :now
WHERE key = %(key)s AND phase = 'submitted'
RETURNING :columns

-- name: end
UPDATE batchwright.provider_job SET
    phase = 'ended', ended_at = :now, document = %(document)s::jsonb, error = %(error)s::jsonb,
    raw_status = coalesce(%(raw_status)s, raw_status), total = %(total)s, succeeded = %(succeeded)s,
    failed = %(failed)s, results_key = %(results_key)s, input_tokens = %(input_tokens)s,
    output_tokens = %(output_tokens)s, audio_seconds = %(audio_seconds)s, cost = %(cost)s,
    failures = 0, next_at = :now + make_interval(secs => %(seconds)s)
WHERE key = %(key)s AND phase <> 'ended'
RETURNING :columns

-- name: clean
UPDATE batchwright.provider_job SET cleaned_at = :now WHERE key = %(key)s AND phase = 'ended' RETURNING :columns

-- Jobs whose staged inputs are still there, because their worker died or failed to remove them. Removal is retried at
-- growing intervals. Until the next retry, no other process gets these jobs.
-- name: take_unclean
UPDATE batchwright.provider_job SET
    failures = failures + 1,
    next_at = :now + make_interval(secs => least(%(seconds_max)s::float8, %(seconds)s::float8 * 2 ^ least(failures, 20)))
WHERE key IN (
    SELECT key FROM batchwright.provider_job
    WHERE phase = 'ended' AND cleaned_at IS NULL AND next_at <= :now
    ORDER BY ended_at, key
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)
RETURNING :columns

-- For a task that ended before its jobs. Jobs that a provider may be working on are left for an operator.
-- name: abandon
UPDATE batchwright.provider_job SET
    phase = 'ended', ended_at = :now, error = %(error)s::jsonb, failures = 0, next_at = :now,
    cleaned_at = CASE WHEN phase IN ('submitting', 'submitted') THEN :now END
WHERE owner = %(owner)s AND phase <> 'ended'
RETURNING key

-- By the part of the owner before the slash: `batch_1` for `batch_1/3`.
-- name: at_work
SELECT one.prefix, sum(coalesce(job.succeeded, 0) + coalesce(job.failed, 0))::bigint,
    sum((coalesce(job.succeeded, 0) + coalesce(job.failed, 0))
        / greatest(1, extract(epoch FROM :now - job.submitted_at)))::float8
FROM unnest(%(prefixes)s::text[]) AS one (prefix)
JOIN batchwright.provider_job AS job
    ON job.owner >= one.prefix || '/' COLLATE "C" AND job.owner < one.prefix || '0' COLLATE "C"
WHERE job.phase = 'submitted'
GROUP BY one.prefix

-- name: forget
DELETE FROM batchwright.provider_job
WHERE owner >= %(prefix)s || '/' COLLATE "C" AND owner < %(prefix)s || '0' COLLATE "C"
RETURNING key

-- Credentials that were refused --------------------------------------------------------------------------------------

-- name: hold
INSERT INTO batchwright.provider_hold AS hold (provider, code, message, since, next_try_at)
VALUES (%(provider)s, %(code)s, %(message)s, :now, :now + make_interval(secs => %(seconds)s))
ON CONFLICT (provider) DO UPDATE SET
    code = excluded.code, message = excluded.message, released_at = NULL,
    since = CASE WHEN hold.released_at IS NULL THEN hold.since ELSE excluded.since END,
    tries = CASE WHEN hold.released_at < :now - make_interval(hours => 1) THEN 0 ELSE hold.tries END,
    next_try_at = CASE
        WHEN hold.released_at IS NULL THEN hold.next_try_at
        WHEN hold.released_at < :now - make_interval(hours => 1) THEN excluded.next_try_at
        ELSE :now + make_interval(secs => least(%(seconds_max)s::float8, %(seconds)s::float8 * 2 ^ least(hold.tries, 20)))
    END
RETURNING provider

-- name: holds
SELECT provider, code, message, since, tries, extract(epoch FROM next_try_at - :now)::float8
FROM batchwright.provider_hold WHERE released_at IS NULL ORDER BY provider

-- One process at a time may try; the next one waits longer.
-- name: try_hold
UPDATE batchwright.provider_hold SET
    tries = tries + 1,
    next_try_at = :now + make_interval(secs => least(%(seconds_max)s::float8, %(seconds)s::float8 * 2 ^ least(tries, 20)))
WHERE provider = %(provider)s AND next_try_at <= :now AND released_at IS NULL
RETURNING provider

-- name: release_hold
UPDATE batchwright.provider_hold SET released_at = :now WHERE provider = %(provider)s AND released_at IS NULL
RETURNING provider
