-- Rounds of upkeep: when each is due, who runs it, and what it needs besides the verbs of jobs.

-- name: make_event_partitions
SELECT batchwright.make_event_partitions(:now)

-- In a new database nothing is due yet; whoever finds a round missing is its first keeper.
-- name: add_rounds
INSERT INTO batchwright.upkeep (name, due_at, keeper)
SELECT round.name, :now + make_interval(secs => round.every_seconds), %(keeper)s
FROM unnest(%(names)s::text[], %(every_seconds)s::float8[]) AS round (name, every_seconds)
ON CONFLICT (name) DO NOTHING
RETURNING name

-- A clock that was set back must not put a round off for longer than its period.
-- name: look
SELECT upkeep.name, upkeep.keeper,
    CASE WHEN upkeep.due_at > :now + make_interval(secs => round.every_seconds) THEN 0
         ELSE extract(epoch FROM :now - upkeep.due_at) END::float8
FROM unnest(%(names)s::text[], %(every_seconds)s::float8[]) AS round (name, every_seconds)
JOIN batchwright.upkeep AS upkeep ON upkeep.name = round.name

-- name: lock_round
SELECT upkeep.name FROM batchwright.upkeep AS upkeep
WHERE upkeep.name = %(name)s
    AND (NOT %(if_due)s::boolean OR upkeep.due_at <= :now
        OR upkeep.due_at > :now + make_interval(secs => %(every_seconds)s::float8))
FOR UPDATE SKIP LOCKED

-- name: end_round
UPDATE batchwright.upkeep
SET ran_at = :now, due_at = :now + make_interval(secs => %(every_seconds)s::float8), keeper = %(keeper)s
WHERE name = %(name)s
RETURNING name
