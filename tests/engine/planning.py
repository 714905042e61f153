"""Many jobs, and what a generic plan reads among them."""

import re

from psycopg import sql

from batchwright.engine.queue import SQL

FINISHED, QUEUED = 20_000, 10_000
CROWD = f"""
    ALTER TABLE batchwright.job DISABLE TRIGGER legal_births;
    INSERT INTO batchwright.job (id, job_type, queue, tenant, status, priority, run_after, payload, max_attempts,
        attempts, claims, pipeline_id, created_at, started_at, finished_at, parent_job_id, round, idempotency_key,
        exclusive_key, deadline)
    SELECT pile.id, 'noop', 'default', 'default', pile.status::batchwright.job_status, 5,
           now() - interval '1 hour' + n * interval '10 milliseconds', '{{"n": 1, "note": null}}', 3,
           (status <> 'QUEUED')::integer, (status <> 'QUEUED')::integer, pile.id, now() - interval '1 hour',
           CASE WHEN status <> 'QUEUED' THEN now() END, CASE WHEN status <> 'QUEUED' THEN now() END,
           CASE WHEN n % 10 = 0 THEN '00000000-0000-0000-0000-000000000001'::uuid END,
           CASE WHEN n % 10 = 0 THEN 1 END,
           CASE WHEN n % 3 = 0 THEN 'key ' || n END,
           CASE WHEN n % 7 = 0 THEN '["k",' || n || ']' END,
           CASE WHEN n % 11 = 0 THEN now() + interval '1 day' END
    FROM (
        SELECT n, gen_random_uuid() AS id,
               CASE WHEN n > {FINISHED} THEN 'QUEUED' WHEN n % 20 = 0 THEN 'FAILED' ELSE 'SUCCEEDED' END AS status
        FROM generate_series(1, {FINISHED + QUEUED}) AS n
    ) AS pile;
    ALTER TABLE batchwright.job ENABLE TRIGGER legal_births;
    INSERT INTO batchwright.queue (name) VALUES ('default');
    UPDATE batchwright.job SET status = 'RUNNING', locked_by = 'w1', locked_at = now(), attempts = 1, claims = 1,
        lease_until = now() + interval '30 seconds', is_current = exclusive_key IS NOT NULL
    WHERE id IN (SELECT id FROM batchwright.job WHERE status = 'QUEUED' ORDER BY id LIMIT 50);
"""


def numbered(name, source=SQL):
    """The statement with `$n` for its parameters, and the parameters' names in that order."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", source[name])))
    text = source[name]
    for number, parameter in enumerate(names, 1):
        text = text.replace(f"%({parameter})s", f"${number}")
    return text.replace("%%", "%"), names


def plan(connection, name, *, source=SQL, run=False, **values):
    """The generic plan of a statement; with `run`, also the pages that it read."""
    text, names = numbered(name, source)
    connection.execute(f"PREPARE probe AS {text}".encode())
    arguments = sql.SQL(", ").join(sql.Literal(values.get(parameter)) for parameter in names)
    how = "ANALYZE, BUFFERS, " if run else ""
    explain = sql.SQL(f"EXPLAIN ({how}FORMAT JSON) EXECUTE probe ({{}})").format(arguments)
    (found,) = connection.execute(explain).fetchone()
    connection.execute("DEALLOCATE probe")
    return found[0]["Plan"]


def nodes(plan):
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def touched(plan):
    """The number of buffers that the whole statement read."""
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def scanned(plan):
    """The number of job rows that all scans together read, whether they matched or not."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan)
        if node["Node Type"].endswith("Scan") and node.get("Relation Name") == "job"
    )


def whole_table_scans(plan):
    return [node for node in nodes(plan) if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "job"]


def indexes(plan):
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
