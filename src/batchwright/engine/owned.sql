-- Jobs that belong to an object of a part, such as those of a batch.

-- The columns of jobs that statements of parts may read, with `FROM :jobs AS job`. The planner inlines it.
-- part: jobs
(SELECT id, parent_job_id, status::text AS status, run_after, finished_at IS NULL AS is_open FROM batchwright.job)

-- For statements that check a claim and write under it at once: `WITH held AS MATERIALIZED (:held_job)`.
-- part: held_job
SELECT job.id, job.attempts FROM batchwright.job AS job
WHERE job.id = %(job_id)s AND job.claims = %(claim)s AND job.locked_by IS NOT DISTINCT FROM %(worker)s::text
    AND job.status = 'RUNNING' AND job.lease_until IS NOT NULL
FOR NO KEY UPDATE

-- And for their events: `INSERT INTO :event_of_held SELECT :about_held, message, fields FROM held`.
-- part: event_of_held
batchwright.job_event (job_id, ts, claim, attempt, worker, event, message, fields)

-- part: about_held
held.id, :now, %(claim)s, held.attempts, %(worker)s

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

-- name: lock
SELECT id FROM batchwright.job WHERE id = %(id)s FOR NO KEY UPDATE

-- Add events to a job in any state, under its row lock, so that their ids grow in commit order.
-- name: note
WITH held AS MATERIALIZED (
    SELECT id, attempts FROM batchwright.job WHERE id = %(id)s FOR NO KEY UPDATE
)
INSERT INTO batchwright.job_event (
    job_id, ts, event, level, claim, attempt, worker, message, fields,
    model, prompt_tokens, completion_tokens, cost, error_kind)
SELECT held.id, :now, input.event, coalesce(input.level, 'info'), %(claim)s, held.attempts, %(worker)s, input.message,
       input.fields, input.model, input.prompt_tokens, input.completion_tokens, input.cost, input.error_kind
FROM held
CROSS JOIN ROWS FROM (jsonb_to_recordset(%(events)s::jsonb) AS (
    event text, level text, message text, fields jsonb, model text, prompt_tokens bigint, completion_tokens bigint,
    cost numeric, error_kind text)) WITH ORDINALITY AS input (
    event, level, message, fields, model, prompt_tokens, completion_tokens, cost, error_kind, place)
ORDER BY input.place
RETURNING job_id
