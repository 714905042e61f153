-- The books of `windlass demo`: a table for the effects of its children, and what is read at the end.

-- name: make_effects
CREATE SCHEMA demo CREATE TABLE effect (number integer NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())

-- name: clock
SELECT clock_timestamp()

-- name: effects
SELECT count(*), count(DISTINCT number) FROM demo.effect

-- name: events
SELECT count(*) FILTER (WHERE event = 'job.started'), count(*) FILTER (WHERE event = 'job.rescued')
FROM windlass.job_event
WHERE job_id IN (SELECT id FROM windlass.job WHERE parent_job_id = %(id)s)

-- name: rescued_at
-- When the last of the dead worker's jobs was taken back.
SELECT max(ts) FROM windlass.job_event WHERE event = 'job.rescued'
