-- The columns for lists and graphs of jobs: no payload and no result, which may be megabytes.

-- name: briefs
SELECT id, job_type, queue, tenant, owner, status::text, priority, attempts, max_attempts, progress_current,
       progress_total, children_open, parent_job_id, lease_until IS NULL AND status = 'RUNNING',
       CASE WHEN status IN ('FAILED', 'QUEUED') THEN error ->> 'code' END,
       left(coalesce(CASE WHEN status IN ('FAILED', 'QUEUED') THEN error ->> 'message' END, message), %(words_max)s),
       run_after, created_at, started_at, finished_at
FROM batchwright.job
WHERE id = ANY(%(ids)s::uuid[]) AND tenant = coalesce(%(tenant)s, tenant)
ORDER BY created_at DESC, id DESC

-- name: ancestors
-- From the parent up; trees are normally less deep than `depth_max`.
WITH RECURSIVE above AS (
    SELECT parent_job_id AS id, 1 AS depth FROM batchwright.job WHERE id = %(id)s AND parent_job_id IS NOT NULL
    UNION ALL
    SELECT job.parent_job_id, above.depth + 1
    FROM above JOIN batchwright.job ON job.id = above.id
    WHERE job.parent_job_id IS NOT NULL AND above.depth < %(depth_max)s
)
SELECT id FROM above ORDER BY depth DESC

-- name: stages
-- The jobs of a pipeline by type, and by the type of the job that waits for them.
WITH RECURSIVE :members,
counted AS MATERIALIZED (
    SELECT id FROM member LIMIT %(count_max)s
)
SELECT job.job_type, parent.job_type, job.status::text, count(*), min(job.created_at)
FROM batchwright.job
LEFT JOIN batchwright.job AS parent ON parent.id = job.parent_job_id
WHERE job.id = ANY(ARRAY(SELECT id FROM counted))
GROUP BY job.job_type, parent.job_type, job.status
ORDER BY min(job.created_at), job.job_type
