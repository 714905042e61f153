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

-- name: lock_held
SELECT job.id
FROM batchwright.job
JOIN unnest(%(ids)s::uuid[], %(claims)s::bigint[], %(workers)s::text[]) AS held (id, claim, worker)
    ON held.id = job.id AND held.claim = job.claims
WHERE job.status = 'RUNNING' AND job.lease_until IS NOT NULL AND job.locked_by IS NOT DISTINCT FROM held.worker
ORDER BY job.id
FOR NO KEY UPDATE OF job
