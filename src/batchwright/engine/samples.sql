-- Figures for every minute, for the dashboard.

-- name: take
INSERT INTO batchwright.sample (at, totals, levels) VALUES (:now, %(totals)s::jsonb, %(levels)s::jsonb)
ON CONFLICT (at) DO NOTHING
RETURNING at

-- name: forget
DELETE FROM batchwright.sample WHERE at < :now - make_interval(secs => %(kept_seconds)s) RETURNING at

-- The last sample of each step, and one from before the first step to compare with. Steps begin at round times, so that
-- a chart keeps its shape from one request to the next.
-- name: read
SELECT one.at, one.totals, one.levels
FROM generate_series(0, %(steps)s::integer) AS step (n)
CROSS JOIN LATERAL (
    SELECT to_timestamp((floor(extract(epoch FROM :now) / %(seconds)s) + 1 - step.n) * %(seconds)s) AS until
) AS ends
CROSS JOIN LATERAL (
    SELECT sample.at, sample.totals, sample.levels FROM batchwright.sample AS sample
    WHERE sample.at < ends.until AND sample.at >= ends.until - make_interval(secs => %(seconds)s)
    ORDER BY sample.at DESC
    LIMIT 1
) AS one
ORDER BY one.at
