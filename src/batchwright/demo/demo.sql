-- Statements of `batchwright demo`: a table for the effects of its children, and the queries for its report.

-- name: make_effects
CREATE SCHEMA demo CREATE TABLE effect (number integer NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())

-- name: clock
SELECT clock_timestamp()

-- name: effects
SELECT count(*), count(DISTINCT number) FROM demo.effect

-- name: events
SELECT count(*) FILTER (WHERE event = 'job.started'), count(*) FILTER (WHERE event = 'job.rescued')
FROM batchwright.job_event
WHERE job_id IN (SELECT id FROM :jobs AS job WHERE parent_job_id = %(id)s)

-- name: rescued_at
-- When the last of the dead worker's jobs was rescued.
SELECT max(ts) FROM batchwright.job_event WHERE event = 'job.rescued'

-- name: taken_over
-- Seconds until a later claim of one of these shards registered its first answer. A segment's `claim` is the number of
-- its journal: all branches of a shard have the shard's number, and each branch has its own range of journal numbers.
SELECT extract(epoch FROM min(segment.registered_at) - %(since)s)::float8
FROM batchwright.batch_segment AS segment
JOIN unnest(%(shards)s::integer[], %(journals)s::bigint[], %(ends)s::bigint[]) AS lost (shard, journal, journals_end)
    ON segment.shard = lost.shard AND segment.claim > lost.journal AND segment.claim < lost.journals_end
WHERE segment.batch_id = %(batch_id)s

-- name: adopted
-- Answers of a dead worker that were on the disk and not registered, and that the workers after it kept.
SELECT coalesce(sum((fields ->> 'answers')::integer), 0) FROM batchwright.job_event WHERE event = 'batch.answers_adopted'

-- name: steps
-- Steps of the documents of a run: completed, completed more than once, and started.
SELECT count(DISTINCT (event.item, event.step)) FILTER (WHERE event.event = 'step_completed'),
       count(*) FILTER (WHERE event.event = 'step_completed')
           - count(DISTINCT (event.item, event.step)) FILTER (WHERE event.event = 'step_completed'),
       count(*) FILTER (WHERE event.event = 'step_started')
FROM (
    SELECT item.id AS item, job_event.fields ->> 'step' AS step, job_event.event
    FROM batchwright.ingest_item AS item
    JOIN batchwright.job_event ON job_event.job_id = ANY(item.job_ids)
    WHERE item.run_id = %(run_id)s AND job_event.event IN ('step_started', 'step_completed')
) AS event
