-- Jobs that belong to an object of a part, such as those of a batch.

-- What the statements of parts may read of jobs: they say `FROM :jobs AS job`. The planner folds it into them.
-- part: jobs
(SELECT id, parent_job_id, status::text AS status, finished_at IS NULL AS is_open FROM batchwright.job)

-- name: children
SELECT id FROM batchwright.job
WHERE parent_job_id = %(id)s AND status::text = ANY(%(statuses)s) AND job_type = coalesce(%(job_type)s, job_type)

-- name: open_children
SELECT id, payload, status = 'QUEUED' AND claims = 0
FROM batchwright.job
WHERE parent_job_id = %(id)s AND finished_at IS NULL
ORDER BY id

-- A job that no worker has had gets another type, queue and payload, once: other workers will run it.
-- name: redirect
WITH queues AS (
    INSERT INTO batchwright.queue (name)
    SELECT %(queue)s WHERE NOT EXISTS (SELECT FROM batchwright.queue WHERE name = %(queue)s)
    ON CONFLICT DO NOTHING
),
moved AS (
    UPDATE batchwright.job SET job_type = %(job_type)s, queue = %(queue)s, payload = %(payload)s::jsonb
    WHERE id = %(id)s AND status = 'QUEUED' AND claims = 0 AND job_type <> %(job_type)s
    RETURNING id
),
events AS (
    INSERT INTO batchwright.job_event (job_id, ts, event, status, claim, attempt)
    SELECT id, :now, 'job.redirected', 'QUEUED', 0, 0 FROM moved
)
SELECT id FROM moved

-- name: absolve
UPDATE batchwright.job SET rescues = 0
WHERE id = %(id)s AND claims = %(claim)s AND status = 'RUNNING' AND rescues > 0
RETURNING id

-- name: lock_held
SELECT job.id
FROM batchwright.job
JOIN unnest(%(ids)s::uuid[], %(claims)s::bigint[], %(workers)s::text[]) AS held (id, claim, worker)
    ON held.id = job.id AND held.claim = job.claims
WHERE job.status = 'RUNNING' AND job.lease_until IS NOT NULL AND job.locked_by IS NOT DISTINCT FROM held.worker
ORDER BY job.id
FOR NO KEY UPDATE OF job
