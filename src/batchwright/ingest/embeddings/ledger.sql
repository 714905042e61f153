-- Requests in flight, for jobs that belong to no run.

-- name: begin
INSERT INTO batchwright.ingest_call (
    id, tenant, job_id, claim, kind, model, lane, inputs, tokens, cost, began_at)
VALUES (
    %(id)s, %(tenant)s, %(job_id)s, %(claim)s, %(kind)s, %(model)s, 'realtime', %(inputs)s, %(tokens)s, %(cost)s, :now)
ON CONFLICT DO NOTHING
RETURNING id

-- name: end
DELETE FROM batchwright.ingest_call WHERE id = %(id)s RETURNING id

-- Requests that an earlier claim of the job sent: their worker is gone.
-- name: end_older
DELETE FROM batchwright.ingest_call
WHERE job_id = %(job_id)s AND run_id IS NULL AND claim < %(claim)s
RETURNING id, model, tokens, cost

-- Requests of jobs that no worker claimed again, such as cancelled ones.
-- name: end_forgotten
DELETE FROM batchwright.ingest_call AS call
WHERE call.run_id IS NULL AND call.item_id IS NULL AND call.began_at < :now - make_interval(secs => %(age_seconds)s)
    AND NOT EXISTS (SELECT FROM :jobs AS job WHERE job.id = call.job_id AND job.is_open)
RETURNING call.id

-- Which of these jobs exist, and which of them have not ended.
-- name: known_jobs
SELECT job.id, job.is_open FROM :jobs AS job WHERE job.id = ANY(%(ids)s::uuid[])

-- name: clock
SELECT :now
