-- Removes old rows, a bounded number at a time. Each walk follows an index from where the last one stopped. It returns
-- how many rows it examined, how many of them it removed, and its new position: rows that must stay are passed once per
-- sweep and never make a statement slower.

-- name: remove_jobs
-- Removes a job if it ended before the cutoff, no worker holds it, and its parent is gone: as long as a parent exists,
-- so do all its children, and it can be rerun and joined. Jobs with an owner are removed with their owner.
-- A scalar subquery looks up the parent, because the planner cannot turn that into a scan of the whole table.
-- This statement does not wait for locks, so it cannot cause a deadlock.
WITH walked AS MATERIALIZED (
    SELECT id, finished_at
    FROM batchwright.job
    WHERE status = %(status)s::batchwright.job_status AND finished_at IS NOT NULL
        AND finished_at < :now - make_interval(secs => %(keep_seconds)s)
        AND (finished_at, id) > (%(after_time)s::timestamptz, %(after_id)s::uuid)
    ORDER BY finished_at, id
    LIMIT %(limit)s
),
free AS MATERIALIZED (
    SELECT job.id
    FROM batchwright.job
    WHERE job.id = ANY(ARRAY(SELECT id FROM walked))
        AND job.finished_at < :now - make_interval(secs => %(keep_seconds)s)
        AND (job.lease_until IS NULL OR job.lease_until < :now)
        AND job.owner IS NULL
        AND (SELECT parent.id FROM batchwright.job AS parent WHERE parent.id = job.parent_job_id) IS NULL
    FOR UPDATE OF job SKIP LOCKED
),
removed AS (
    DELETE FROM batchwright.job WHERE id = ANY(ARRAY(SELECT id FROM free)) RETURNING id
)
SELECT (SELECT count(*) FROM walked), (SELECT count(*) FROM removed), last.finished_at, last.id
FROM (SELECT) AS answer
LEFT JOIN (SELECT finished_at, id FROM walked ORDER BY finished_at DESC, id DESC LIMIT 1) AS last ON true

-- name: remove_events
-- The default partition holds events that outlived their week; they are removed one by one, after their job.
WITH walked AS MATERIALIZED (
    SELECT job_id, id
    FROM batchwright.job_event_default
    WHERE (job_id, id) > (%(after_job)s::uuid, %(after_id)s::bigint)
    ORDER BY job_id, id
    LIMIT %(limit)s
),
gone AS MATERIALIZED (
    SELECT job_id, id FROM walked
    WHERE (SELECT job.id FROM batchwright.job WHERE job.id = walked.job_id) IS NULL
),
removed AS (
    DELETE FROM batchwright.job_event_default AS event USING gone
    WHERE event.job_id = gone.job_id AND event.id = gone.id
    RETURNING event.id
)
SELECT (SELECT count(*) FROM walked), (SELECT count(*) FROM removed), last.job_id, last.id
FROM (SELECT) AS answer
LEFT JOIN (SELECT job_id, id FROM walked ORDER BY job_id DESC, id DESC LIMIT 1) AS last ON true

-- name: remove_requests
-- All of them are removed, so there is no position to remember.
WITH walked AS MATERIALIZED (
    SELECT tenant, key
    FROM batchwright.api_request
    WHERE created_at < :now - make_interval(secs => %(keep_seconds)s)
    ORDER BY created_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),
removed AS (
    DELETE FROM batchwright.api_request AS request USING walked
    WHERE request.tenant = walked.tenant AND request.key = walked.key
    RETURNING request.key
)
SELECT (SELECT count(*) FROM walked), (SELECT count(*) FROM removed), NULL, NULL

-- name: old_partitions
-- Weeks old enough that the jobs of their time may be gone, oldest first.
SELECT name, ends
FROM (
    SELECT relname AS name, to_date(right(relname, 8), 'IYYY"_w"IW')::timestamp AT TIME ZONE 'UTC' + interval '7 days' AS ends
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = 'batchwright.job_event'::regclass AND relname ~ '^job_event_[0-9]{4}_w[0-9]{2}$'
) AS week
WHERE ends < :now - make_interval(secs => %(keep_seconds)s)
ORDER BY ends

-- name: drop_partition
SELECT batchwright.drop_event_partition(
    %(partition)s, %(created_before)s::timestamptz, %(jobs_max)s::integer, %(events_max)s::integer)
