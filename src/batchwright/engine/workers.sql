-- The live workers, each with a row that its heartbeat keeps fresh.

-- name: register
INSERT INTO batchwright.worker (
    id, host, pid, version, queues, operations, concurrency, on_demand_types, on_demand_queues, started_at,
    heartbeat_at)
VALUES (
    %(id)s, %(host)s, %(pid)s, %(version)s, %(queues)s::text[], %(operations)s::text[], %(concurrency)s,
    %(on_demand_types)s::text[], %(on_demand_queues)s::text[], :now, :now)
ON CONFLICT (id) DO UPDATE SET heartbeat_at = :now, left_at = NULL

-- Also returns how many live workers are equal to this one, as far as that can be counted quickly.
-- name: heartbeat
UPDATE batchwright.worker SET heartbeat_at = :now, running = %(running)s, broken = %(broken)s,
    stopping_at = CASE WHEN %(stopping)s::boolean THEN coalesce(stopping_at, :now) END
WHERE id = %(id)s
RETURNING (
    SELECT count(*) FROM batchwright.worker AS peer
    WHERE peer.heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s) AND peer.stopping_at IS NULL
        AND peer.queues IS NOT DISTINCT FROM worker.queues
        AND cardinality(peer.operations) = cardinality(worker.operations))

-- name: leave
-- If other processes rely on the queues that the worker served on demand, its row stays until the worker counts as
-- dead: it may only be restarting.
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

-- name: idle
-- Workers that take jobs of this queue on demand and have none, while no job of the queue is due: a busy worker may
-- give them a part of its work. Of many workers, only some are examined.
SELECT count(*)
FROM (
    SELECT worker.id FROM batchwright.worker
    WHERE left_at IS NULL AND stopping_at IS NULL AND broken IS NULL
        AND heartbeat_at >= :now - make_interval(secs => %(silent_seconds)s)
        AND %(job_type)s = ANY(on_demand_types)
        AND EXISTS (
            SELECT FROM unnest(on_demand_queues) AS served (queue)
            WHERE served.queue = %(queue)s OR (right(served.queue, 1) = '/' AND starts_with(%(queue)s, served.queue)))
    ORDER BY random()
    LIMIT %(limit)s
) AS live
WHERE NOT EXISTS (
        SELECT FROM batchwright.job AS held
        WHERE held.locked_by = live.id AND held.queue = %(queue)s)
    AND NOT EXISTS (
        SELECT FROM batchwright.job AS waiting
        WHERE waiting.status = 'QUEUED' AND waiting.queue = %(queue)s AND waiting.run_after <= :now)
