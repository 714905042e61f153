-- The workers that live, each in a row that its heartbeat keeps fresh.

-- name: register
INSERT INTO batchwright.worker (
    id, host, pid, version, queues, operations, concurrency, on_demand_types, on_demand_queues, started_at,
    heartbeat_at)
VALUES (
    %(id)s, %(host)s, %(pid)s, %(version)s, %(queues)s::text[], %(operations)s::text[], %(concurrency)s,
    %(on_demand_types)s::text[], %(on_demand_queues)s::text[], :now, :now)
ON CONFLICT (id) DO UPDATE SET heartbeat_at = :now, left_at = NULL

-- name: heartbeat
UPDATE batchwright.worker SET heartbeat_at = :now, running = %(running)s, broken = %(broken)s,
    stopping_at = CASE WHEN %(stopping)s::boolean THEN coalesce(stopping_at, :now) END
WHERE id = %(id)s
RETURNING id

-- name: leave
-- If others go by what the worker took on demand, the row stays until it counts as dead: it may only be restarting.
WITH gone AS (
    DELETE FROM batchwright.worker
    WHERE id = %(id)s AND (on_demand_queues IS NULL OR left(queues[1], 1) = :private_mark)
    RETURNING id
)
UPDATE batchwright.worker
SET left_at = :now, stopping_at = coalesce(stopping_at, :now), running = 0, gauges = NULL
WHERE id = %(id)s AND left_at IS NULL AND NOT EXISTS (SELECT FROM gone)
RETURNING id

-- name: remove_dead
DELETE FROM batchwright.worker WHERE heartbeat_at < :now - make_interval(secs => %(silent_seconds)s) RETURNING id
