-- Rounds of upkeep: when each is due, who runs it, and what it needs besides the verbs of jobs.

-- name: make_event_partitions
SELECT batchwright.make_event_partitions(:now)

-- A new round counts as just run; the process that finds it missing is its first keeper.
-- name: add_rounds
INSERT INTO batchwright.upkeep (name, ran_at, due_at, keeper)
SELECT round.name, :now, :now + make_interval(secs => round.every_seconds), %(keeper)s
FROM unnest(%(names)s::text[], %(every_seconds)s::float8[]) AS round (name, every_seconds)
ON CONFLICT (name) DO NOTHING
RETURNING name

-- The only query of an idle worker: the rounds that are due soon, the queues that have due jobs, and whether any of
-- these jobs must run alone. It reads only the head of each queue and priority. A thousand workers may run this all the
-- time, so it is as small as possible: each further table or parameter has a measurable cost. If a round ran in the
-- future, the clock was set back, and the round is due. The rescue is always included, because its keeper keeps all
-- rounds.
-- name: look
WITH RECURSIVE head AS (
    (SELECT job.queue, job.priority, job.run_after FROM batchwright.job AS job
     WHERE job.status = 'QUEUED'
     ORDER BY job.queue, job.priority, job.run_after, job.id
     LIMIT 1)
    UNION ALL
    SELECT next.queue, next.priority, next.run_after
    FROM head
    CROSS JOIN LATERAL (
        SELECT job.queue, job.priority, job.run_after FROM batchwright.job AS job
        WHERE job.status = 'QUEUED' AND (job.queue, job.priority) > (head.queue, head.priority)
        ORDER BY job.queue, job.priority, job.run_after, job.id
        LIMIT 1
    ) AS next
)
SELECT 'round', upkeep.name, upkeep.keeper,
    CASE WHEN upkeep.ran_at > :now THEN 0 ELSE extract(epoch FROM :now - upkeep.due_at) END::float8
FROM batchwright.upkeep AS upkeep
WHERE upkeep.due_at <= :now + make_interval(secs => %(soon_seconds)s) OR upkeep.ran_at > :now OR upkeep.name = 'rescue'
UNION ALL
SELECT 'queue', head.queue, NULL, NULL::float8 FROM head
WHERE head.run_after <= :now AND head.queue <> ALL (:paused_queues)
UNION ALL
SELECT 'suspects', NULL, NULL, NULL WHERE EXISTS (
    SELECT FROM batchwright.job AS job
    WHERE job.status = 'QUEUED' AND job.rescues >= :deaths_max AND job.run_after <= :now)

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
