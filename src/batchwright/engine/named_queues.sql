-- Queues by name: enqueue creates their rows.

-- name: all
SELECT name, paused_at IS NOT NULL FROM batchwright.queue ORDER BY name

-- name: pause
UPDATE batchwright.queue SET paused_at = coalesce(paused_at, :now) WHERE name = %(queue)s RETURNING paused_at

-- name: resume
UPDATE batchwright.queue SET paused_at = NULL WHERE name = %(queue)s RETURNING paused_at
