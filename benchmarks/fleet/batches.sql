-- Batches of many tenants with their samples, tasks and runs; and a week of figures by the minute.

SET synchronous_commit = off;
ALTER TABLE batchwright.batch DISABLE TRIGGER legal_batch_births;
ALTER TABLE batchwright.task DISABLE TRIGGER legal_task_births;
ALTER TABLE batchwright.ingest_run DISABLE TRIGGER legal_run_births;

INSERT INTO batchwright.batch (
    id, tenant, status, job_id, queue, priority, endpoint, input_file_id, completion_window, family, models, total,
    completed, failed, input_tokens, cached_tokens, output_tokens, usage_by_model, progress_by_model, error_summary,
    created_at, expires_at, in_progress_at, completed_at, failed_at, output_file_id, error_file_id)
SELECT 'batch_' || lpad(to_hex(n), 32, '0'), CASE WHEN n % 10 = 0 THEN 'tenant_' || n / 10 % 10 ELSE 'default' END,
    one.status::batchwright.batch_status, lpad(to_hex(n), 32, '0')::uuid, 'batches', 5, '/v1/chat/completions',
    'file-' || lpad(to_hex(n), 32, '0'), '24h', 'family', ARRAY['model_' || n % 5], 1000,
    CASE one.status WHEN 'in_progress' THEN 400 WHEN 'completed' THEN 990 ELSE 0 END,
    CASE WHEN one.status = 'completed' THEN 10 ELSE 0 END, 100000, 30000, 50000,
    jsonb_build_object('model_' || n % 5, '{"input": 100000, "cached": 30000, "output": 50000, "reasoning": 0}'::jsonb),
    jsonb_build_object('model_' || n % 5, '{"total": 1000, "completed": 400, "failed": 0}'::jsonb),
    CASE WHEN one.status = 'completed' THEN '{"rate_limit_exceeded": [7, "r-1"], "invalid_value": [3, "r-2"]}'::jsonb
         ELSE '{}' END,
    one.at, one.at + interval '30 days', one.at, CASE WHEN one.status = 'completed' THEN one.at + interval '1 minute' END,
    CASE WHEN one.status = 'failed' THEN one.at + interval '1 minute' END, NULL, NULL
FROM (
    SELECT n, now() - interval '28 days' * (1 - n / :batches::float8) AS at,
        CASE WHEN n > :batches - 100 THEN 'in_progress' WHEN n % 50 = 0 THEN 'failed' ELSE 'completed' END AS status
    FROM generate_series(1, :batches) AS n
) AS one;

-- The newest hundred have run for an hour, in steps of ten seconds.
INSERT INTO batchwright.batch_sample
SELECT batch.id, models[1], batch.in_progress_at + step * interval '10 seconds', 10, 90, 1, 9000, 3000, 5000,
    '{"worker-1": [100, 90], "worker-2": [80, 80]}'
FROM batchwright.batch CROSS JOIN generate_series(0, 359) AS step
WHERE batch.status = 'in_progress';

INSERT INTO batchwright.batch_segment (
    batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally, registered_at)
SELECT batch.id, 0, 1, n, 'elsewhere', n * 100, n * 100 + 100, 1, '{}', now() - n * interval '1 second'
FROM batchwright.batch CROSS JOIN generate_series(0, 399) AS n
WHERE batch.status = 'in_progress';

INSERT INTO batchwright.task (
    id, tenant, task_type, targets, inputs, job_id, queue, priority, created_at, deadline_at, status, ended_at,
    provider_state, in_progress_at)
SELECT 'task_' || lpad(to_hex(n), 32, '0'), 'default', 'transcription', '[{"provider": "p", "model": "m"}]', '[]',
    gen_random_uuid(), 'tasks/p', 5, now() - n * interval '1 minute', now() + interval '1 day',
    (CASE WHEN n % 20 = 0 THEN 'IN_PROGRESS' ELSE 'COMPLETED' END)::batchwright.task_status,
    CASE WHEN n % 20 > 0 THEN now() END, '{}', now()
FROM generate_series(1, :batches) AS n;

INSERT INTO batchwright.ingest_collection (tenant, name, created_at) VALUES ('default', 'papers', now());
INSERT INTO batchwright.ingest_run (
    id, tenant, collection_id, kind, sources, config, recipe, lane, priority, job_id, created_at, status, ended_at)
SELECT 'run_' || lpad(to_hex(n), 32, '0'), 'default', id, 'k', '["/papers"]', '{}', 'r', 'auto', 5, gen_random_uuid(),
    now() - n * interval '1 minute',
    (CASE WHEN n % 20 = 0 THEN 'RUNNING' ELSE 'COMPLETED' END)::batchwright.run_status,
    CASE WHEN n % 20 > 0 THEN now() END
FROM batchwright.ingest_collection, generate_series(1, :batches / 10) AS n;

INSERT INTO batchwright.sample
SELECT now() - n * interval '1 minute',
    jsonb_build_object(
        'jobs', jsonb_build_object('succeed', 1e9 - 600 * n, 'fail', 1e6 - n),
        'requests', jsonb_build_object('model_0', 1e9 - 100 * n, 'model_1', 1e9 - 50 * n),
        'tokens', jsonb_build_object('model_0', 1e12 - 10000 * n), 'errors', jsonb_build_object('model_0', 1e6 - n)),
    '{"due": 10, "scheduled": 5, "running": 3, "oldest_due_seconds": 1.5, "queues": {"queue_1": 10}, "workers": 2}'
FROM generate_series(0, 11519) AS n;

ALTER TABLE batchwright.batch ENABLE TRIGGER legal_batch_births;
ALTER TABLE batchwright.task ENABLE TRIGGER legal_task_births;
ALTER TABLE batchwright.ingest_run ENABLE TRIGGER legal_run_births;
