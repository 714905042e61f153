-- The steps of one item. A writer must hold the item's job, and lock it in the same transaction.

-- name: steps
SELECT step, state, key, output, retry_count, extract(epoch FROM not_before - :now)::float8, waiting
FROM batchwright.ingest_step
WHERE item_id = %(item_id)s AND generation = %(generation)s

-- name: live
SELECT version.id, version.recipe, version.sha256, version.steps, document.etag
FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_version AS version ON version.id = document.live_version
WHERE document.id = %(document_id)s

-- Starts a step, if the claim still holds and the step is not done. Writes the event unless the run is parked.
-- name: start
WITH held AS MATERIALIZED (:held_job),
run AS (SELECT status::text AS status FROM batchwright.ingest_run WHERE id = %(run_id)s),
begun AS (
    INSERT INTO batchwright.ingest_step AS step (item_id, generation, step, starts, started_at)
    SELECT %(item_id)s, %(generation)s, %(step)s, 1, :now FROM held
    ON CONFLICT (item_id, generation, step) DO UPDATE
    SET starts = step.starts + 1, started_at = :now, not_before = NULL, waiting = NULL
    WHERE step.state = 'open'
    RETURNING starts
),
told AS (
    INSERT INTO :event_of_held
    SELECT :about_held, 'step_started', %(step)s, jsonb_build_object('step', %(step)s::text, 'start', begun.starts)
    FROM held, begun, run
    WHERE run.status = 'RUNNING'
)
SELECT begun.starts, run.status FROM begun, run

-- Completes a step once, if the claim still holds. A step that is already done gives no row.
-- name: complete
WITH held AS MATERIALIZED (:held_job),
done AS (
    INSERT INTO batchwright.ingest_step AS step (
        item_id, generation, step, state, key, output, is_reused, started_at, ended_at, error_kind)
    SELECT %(item_id)s, %(generation)s, %(step)s, 'done', %(key)s, %(output)s::jsonb, %(is_reused)s, :now, :now, ''
    FROM held
    ON CONFLICT (item_id, generation, step) DO UPDATE
    SET state = 'done', key = EXCLUDED.key, output = EXCLUDED.output, is_reused = EXCLUDED.is_reused, ended_at = :now,
        error_kind = '', not_before = NULL, waiting = NULL
    WHERE step.state = 'open'
    RETURNING step.step
),
advanced AS (
    UPDATE batchwright.ingest_item AS item SET step = %(reached)s, retry_count = 0, last_error_kind = ''
    FROM done
    WHERE item.id = %(item_id)s AND item.status = 'OPEN'
),
told AS (
    INSERT INTO :event_of_held
    SELECT :about_held, 'step_completed', done.step, %(fields)s::jsonb
    FROM held, done
)
SELECT done.step FROM done

-- name: put_off
UPDATE batchwright.ingest_step SET retry_count = %(retry_count)s, error_kind = %(error_kind)s, waiting = %(waiting)s::jsonb,
    not_before = :now + make_interval(secs => %(seconds)s)
WHERE item_id = %(item_id)s AND generation = %(generation)s AND step = %(step)s AND state = 'open'
RETURNING step

-- name: note_error
UPDATE batchwright.ingest_item SET retry_count = %(retry_count)s, last_error_kind = %(error_kind)s,
    last_error = %(error)s::jsonb
WHERE id = %(item_id)s AND status = 'OPEN'
RETURNING id

-- The output of a step is gone: it must run again.
-- name: undo
UPDATE batchwright.ingest_step SET state = 'open', key = NULL, output = NULL, ended_at = NULL
WHERE item_id = %(item_id)s AND generation = %(generation)s AND step = %(step)s AND state = 'done'
RETURNING step
