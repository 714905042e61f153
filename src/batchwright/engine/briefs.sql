-- The columns for lists and graphs of jobs: no payload and no result, which may be megabytes.

-- part: brief
job.id, job.job_type, job.queue, job.tenant, job.owner, job.status::text, job.priority, job.attempts, job.max_attempts,
job.progress_current, job.progress_total, job.children_open, job.parent_job_id,
job.lease_until IS NULL AND job.status = 'RUNNING',
CASE WHEN job.status IN ('FAILED', 'QUEUED') THEN job.error ->> 'code' END,
left(coalesce(CASE WHEN job.status IN ('FAILED', 'QUEUED') THEN job.error ->> 'message' END, job.message),
     %(words_max)s),
job.run_after, job.created_at, job.started_at, job.finished_at

-- name: briefs
SELECT :brief
FROM batchwright.job
WHERE id = ANY(%(ids)s::uuid[]) AND tenant = coalesce(%(tenant)s, tenant)
ORDER BY created_at DESC, id DESC

-- name: children
-- Some children of each of these jobs, in the order of their index: however many there are, only these are read.
SELECT job.round, EXISTS (SELECT FROM batchwright.job AS below WHERE below.parent_job_id = job.id), :brief
FROM unnest(%(parents)s::uuid[]) AS parent (id)
CROSS JOIN LATERAL (
    SELECT * FROM batchwright.job
    WHERE parent_job_id = parent.id AND tenant = coalesce(%(tenant)s, tenant)
        AND (round, id) > (%(after_round)s::smallint, %(after_id)s::uuid)
    ORDER BY round, id
    LIMIT %(limit)s
) AS job
ORDER BY job.parent_job_id, job.round, job.id

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
