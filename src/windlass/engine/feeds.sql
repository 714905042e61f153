-- What followers of events ask: has anything happened at all, and what happened to these jobs since?

-- name: last_written
-- Every event takes its id from here, so a number that has not moved means that nothing was written.
SELECT last_value FROM windlass.job_event_id

-- name: last_of_each
SELECT feed.id, coalesce((SELECT max(event.id) FROM windlass.job_event AS event WHERE event.job_id = feed.id), 0)
FROM unnest(%(ids)s::uuid[]) AS feed (id)

-- name: since
SELECT event.id, event.job_id, event.ts, event.event, event.level, event.status::text, event.claim, event.attempt,
       event.worker, event.message, event.fields, event.model, event.prompt_tokens, event.completion_tokens,
       event.cost, event.error_kind
FROM unnest(%(ids)s::uuid[], %(afters)s::bigint[]) AS feed (id, after)
CROSS JOIN LATERAL (
    SELECT * FROM windlass.job_event
    WHERE job_event.job_id = feed.id AND job_event.id > feed.after
    ORDER BY job_event.id
    LIMIT %(limit)s
) AS event
