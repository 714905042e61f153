-- Queries for followers of events: whether there are new events at all, and the new events of these jobs.

-- name: last_written
-- Every event takes its id from here, so a number that has not moved means that nothing new was written.
SELECT last_value FROM batchwright.job_event_id

-- name: last_of_each
SELECT stream.id, coalesce((SELECT max(event.id) FROM batchwright.job_event AS event WHERE event.job_id = stream.id), 0)
FROM unnest(%(ids)s::uuid[]) AS stream (id)

-- name: gone
SELECT stream.id FROM unnest(%(ids)s::uuid[]) AS stream (id)
WHERE (SELECT job.id FROM batchwright.job WHERE job.id = stream.id) IS NULL

-- name: since
-- A page for each position. It ends with the event that fills it, by number or by bytes: an event may have 64 KiB.
SELECT stream.turn, event.is_full, event.id, event.job_id, event.ts, event.event, event.level, event.status::text,
       event.claim, event.attempt, event.worker, event.message, event.fields, event.model, event.prompt_tokens,
       event.completion_tokens, event.cost, event.error_kind
FROM unnest(%(ids)s::uuid[], %(afters)s::bigint[]) WITH ORDINALITY AS stream (id, after, turn)
CROSS JOIN LATERAL (
    SELECT page.*, sum(bytes) OVER sofar - bytes AS bytes_before,
           sum(bytes) OVER sofar >= %(bytes)s OR row_number() OVER sofar = %(limit)s AS is_full
    FROM (
        SELECT *, coalesce(octet_length(message), 0) + coalesce(octet_length(fields::text), 0) AS bytes
        FROM batchwright.job_event
        WHERE job_event.job_id = stream.id AND job_event.id > stream.after
        ORDER BY job_event.id
        LIMIT %(limit)s
    ) AS page
    WINDOW sofar AS (ORDER BY page.id ROWS UNBOUNDED PRECEDING)
) AS event
WHERE event.bytes_before < %(bytes)s
ORDER BY stream.turn, event.id
