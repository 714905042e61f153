-- Every statement that reads or writes batchwright.schedule. The queue creates the jobs, in the same transaction.

-- part: columns
id, tenant, name, cron, timezone, missed, job, tick_field, next_at, last_tick_at, last_job_id, last_error, fires,
paused_at, created_at, updated_at

-- part: named
tenant = %(tenant)s AND (id = %(id)s::uuid OR name = %(name)s::text)

-- name: now
SELECT :now

-- name: create
INSERT INTO batchwright.schedule (id, tenant, name, cron, timezone, missed, job, tick_field, next_at, created_at, updated_at)
VALUES (%(id)s, %(tenant)s, %(name)s, %(cron)s, %(timezone)s, %(missed)s, %(job)s::jsonb, %(tick_field)s, %(next_at)s,
        :now, :now)
ON CONFLICT (tenant, name) DO NOTHING
RETURNING :columns

-- name: get
SELECT :columns FROM batchwright.schedule WHERE :named

-- name: lock
SELECT :columns FROM batchwright.schedule WHERE :named FOR UPDATE

-- name: list
SELECT :columns FROM batchwright.schedule
WHERE tenant = %(tenant)s AND name > %(after)s
ORDER BY name
LIMIT %(limit)s

-- name: list_everywhere
SELECT :columns FROM batchwright.schedule
WHERE (tenant, name) > (%(after_tenant)s, %(after)s)
ORDER BY tenant, name
LIMIT %(limit)s

-- name: replace
UPDATE batchwright.schedule
SET cron = %(cron)s, timezone = %(timezone)s, missed = %(missed)s, job = %(job)s::jsonb, tick_field = %(tick_field)s,
    next_at = %(next_at)s, last_error = NULL, updated_at = :now
WHERE id = %(id)s
RETURNING :columns

-- name: pause
UPDATE batchwright.schedule
SET paused_at = coalesce(paused_at, :now), updated_at = CASE WHEN paused_at IS NULL THEN :now ELSE updated_at END
WHERE :named
RETURNING :columns

-- name: resume
UPDATE batchwright.schedule SET paused_at = NULL, next_at = %(next_at)s, updated_at = :now
WHERE id = %(id)s
RETURNING :columns

-- name: delete
DELETE FROM batchwright.schedule WHERE :named RETURNING :columns

-- name: limit_lock_wait
-- A user's long transaction may hold the key of one schedule's job: the other schedules must not wait for it.
SELECT set_config('lock_timeout', '1s', true)

-- name: due
SELECT :columns, :now
FROM batchwright.schedule
WHERE paused_at IS NULL AND next_at <= :now
ORDER BY next_at, id
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED

-- name: move
UPDATE batchwright.schedule
SET next_at = %(next_at)s, last_tick_at = coalesce(%(last_tick_at)s, last_tick_at),
    last_job_id = coalesce(%(last_job_id)s, last_job_id), last_error = %(last_error)s, fires = fires + %(fires)s
WHERE id = %(id)s

-- name: run
UPDATE batchwright.schedule SET last_job_id = %(job_id)s, fires = fires + 1 WHERE id = %(id)s
