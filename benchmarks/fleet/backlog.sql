-- Jobs that wait: half of them in one queue, the others in nineteen; all are due, and newer than all others.

SET synchronous_commit = off;

INSERT INTO batchwright.job (
    id, job_type, queue, tenant, priority, run_after, payload, max_attempts, pipeline_id, created_at)
SELECT one.id, 'type_' || n % 10, 'queue_' || CASE WHEN n % 2 = 0 THEN 0 ELSE n % 20 END,
    CASE WHEN n % 10 = 0 THEN 'tenant_' || n / 10 % 10 ELSE 'default' END, 5, now() - interval '1 hour', '{"n": 1}', 3,
    one.id, now() + n * interval '1 microsecond'
FROM (
    SELECT n, lpad(to_hex(8589934592 + n), 32, '0')::uuid AS id FROM generate_series(1, :jobs) AS n
) AS one;
