-- Datasets and their rows.

-- name: staging
SELECT id, sha256, next_offset, next_line, rows_ok, rows_bad, errors_kept
FROM emissions.dataset
WHERE job_id = %(job_id)s AND NOT is_current AND retired_at IS NULL
FOR UPDATE

-- name: begin
INSERT INTO emissions.dataset (
    job_id, tenant, dataset_key, kind, module, data_type, target, method, year, file_name, sha256, bytes,
    next_offset, next_line)
VALUES (
    %(job_id)s, %(tenant)s, %(dataset_key)s, %(kind)s, %(module)s, %(data_type)s, %(target)s, %(method)s, %(year)s,
    %(file_name)s, %(sha256)s, %(bytes)s, %(offset)s, %(line)s)
RETURNING id

-- name: abandon
UPDATE emissions.dataset SET retired_at = now() WHERE id = %(id)s

-- name: abandon_others
-- Files of the same key whose job ended before they did; a rerun of it starts over.
UPDATE emissions.dataset SET retired_at = now()
WHERE tenant = %(tenant)s AND dataset_key = %(dataset_key)s AND job_id <> %(job_id)s
    AND NOT is_current AND retired_at IS NULL
    AND NOT EXISTS (SELECT FROM :jobs AS job WHERE job.id = dataset.job_id AND job.is_open)

-- name: purge_entries
DELETE FROM emissions.entry
WHERE (dataset_id, line) IN (
    SELECT entry.dataset_id, entry.line
    FROM emissions.dataset JOIN emissions.entry ON entry.dataset_id = dataset.id
    WHERE dataset.tenant = %(tenant)s AND dataset.dataset_key = %(dataset_key)s AND dataset.retired_at IS NOT NULL
    LIMIT %(limit)s)
RETURNING 1

-- name: hold
-- Only the worker that locks this row at this position may write the page that starts there.
SELECT errors_kept FROM emissions.dataset
WHERE id = %(id)s AND NOT is_current AND retired_at IS NULL AND next_offset = %(offset)s
FOR UPDATE

-- name: stage
INSERT INTO emissions.entry (dataset_id, line, reference, organisation_unit, activity, entry_date, amount, unit)
SELECT %(id)s, row.line, row.reference, row.organisation_unit, row.activity, row.entry_date, row.amount, row.unit
FROM unnest(
    %(lines)s::bigint[], %(references)s::text[], %(organisation_units)s::text[], %(activities)s::text[],
    %(dates)s::date[], %(amounts)s::numeric[], %(units)s::text[])
    AS row (line, reference, organisation_unit, activity, entry_date, amount, unit)
ORDER BY row.line
ON CONFLICT (dataset_id, reference) DO NOTHING
RETURNING line

-- name: first_lines
SELECT reference, line FROM emissions.entry WHERE dataset_id = %(id)s AND reference = ANY(%(references)s::text[])

-- name: note_errors
INSERT INTO emissions.row_error (dataset_id, line, column_name, value, reason)
SELECT %(id)s, row.line, row.column_name, row.value, row.reason
FROM unnest(%(lines)s::bigint[], %(columns)s::text[], %(values)s::text[], %(reasons)s::text[])
    AS row (line, column_name, value, reason)

-- name: advance
UPDATE emissions.dataset
SET next_offset = %(offset)s, next_line = %(line)s, rows_ok = rows_ok + %(ok)s, rows_bad = rows_bad + %(bad)s,
    errors_kept = errors_kept + %(kept)s, units = ARRAY(SELECT DISTINCT unnest(units || %(units)s::text[]) ORDER BY 1)
WHERE id = %(id)s
RETURNING rows_ok, rows_bad, errors_kept

-- name: first_errors
SELECT line, column_name, value, reason FROM emissions.row_error
WHERE dataset_id = %(id)s ORDER BY line, column_name LIMIT %(limit)s

-- name: lock_swap
-- One swap of a key at a time; and none while units change, so that no total is computed from outdated units.
SELECT pg_advisory_xact_lock(hashtextextended('emissions dataset ' || %(tenant)s || ' ' || %(dataset_key)s, 0)),
       pg_advisory_xact_lock_shared(hashtextextended('emissions units ' || %(tenant)s, 0))

-- name: lock_units
SELECT pg_advisory_xact_lock(hashtextextended('emissions units ' || %(tenant)s, 0))

-- name: lock_factors
SELECT pg_advisory_xact_lock(hashtextextended('emissions factors ' || %(tenant)s || ' ' || %(year)s::int, 0)),
       pg_advisory_xact_lock_shared(hashtextextended('emissions units ' || %(tenant)s, 0))

-- name: retire
UPDATE emissions.dataset SET is_current = false, retired_at = now()
WHERE tenant = %(tenant)s AND dataset_key = %(dataset_key)s AND is_current

-- name: make_current
-- Only a file that was read to its end, by us.
UPDATE emissions.dataset SET is_current = true, current_at = now()
WHERE id = %(id)s AND NOT is_current AND retired_at IS NULL AND next_offset = bytes
RETURNING id

-- name: units
SELECT code, dimension, to_base, name, retired_at IS NOT NULL FROM emissions.unit WHERE tenant = %(tenant)s

-- name: put_units
INSERT INTO emissions.unit (tenant, code, dimension, to_base, name, dataset_id)
SELECT %(tenant)s, row.code, row.dimension, row.to_base, row.name, %(id)s
FROM unnest(%(codes)s::text[], %(dimensions)s::text[], %(factors)s::numeric[], %(names)s::text[])
    AS row (code, dimension, to_base, name)
ON CONFLICT (tenant, code) DO UPDATE
SET dimension = excluded.dimension, to_base = excluded.to_base, name = excluded.name,
    dataset_id = excluded.dataset_id, retired_at = NULL

-- name: retire_units
UPDATE emissions.unit SET retired_at = now()
WHERE tenant = %(tenant)s AND code = ANY(%(codes)s::text[]) AND retired_at IS NULL

-- name: modules_using_units
SELECT module, year FROM emissions.dataset
WHERE tenant = %(tenant)s AND kind = 'entries' AND is_current AND units && %(codes)s::text[]
UNION
SELECT module, year FROM emissions.factor WHERE tenant = %(tenant)s AND unit = ANY(%(codes)s::text[])

-- name: drop_factors
DELETE FROM emissions.factor WHERE tenant = %(tenant)s AND year = %(year)s AND module = ANY(%(modules)s::text[])

-- name: put_factors
INSERT INTO emissions.factor (tenant, module, year, activity, unit, kg_per_unit, dataset_id)
SELECT %(tenant)s, row.module, %(year)s, row.activity, row.unit, row.kg_per_unit, %(id)s
FROM unnest(%(modules)s::text[], %(activities)s::text[], %(units)s::text[], %(factors)s::numeric[])
    AS row (module, activity, unit, kg_per_unit)

-- name: allow_long_statement
SET LOCAL statement_timeout = '60s'

-- name: compute
-- Amounts are added up before they are converted, and rounded once at the end.
WITH grouped AS MATERIALIZED (
    SELECT entry.organisation_unit, entry.activity, entry.unit, sum(entry.amount) AS amount, count(*) AS rows
    FROM emissions.dataset JOIN emissions.entry ON entry.dataset_id = dataset.id
    WHERE dataset.tenant = %(tenant)s AND dataset.module = %(module)s AND dataset.year = %(year)s
        AND dataset.kind = 'entries' AND dataset.is_current
    GROUP BY entry.organisation_unit, entry.activity, entry.unit
),
converted AS (
    SELECT grouped.*, grouped.amount * unit.to_base * factor.kg_per_unit / per.to_base AS kg_co2e
    FROM grouped
    LEFT JOIN emissions.unit ON unit.tenant = %(tenant)s AND unit.code = grouped.unit
    LEFT JOIN emissions.factor ON factor.tenant = %(tenant)s AND factor.module = %(module)s AND factor.year = %(year)s
        AND factor.activity = grouped.activity
    LEFT JOIN emissions.unit AS per ON per.tenant = %(tenant)s AND per.code = factor.unit
        AND per.dimension = unit.dimension
)
SELECT organisation_unit, activity, round(sum(kg_co2e), 6),
       coalesce(sum(rows) FILTER (WHERE kg_co2e IS NOT NULL), 0)::bigint,
       coalesce(sum(rows) FILTER (WHERE kg_co2e IS NULL), 0)::bigint
FROM converted
GROUP BY organisation_unit, activity
ORDER BY organisation_unit, activity
LIMIT %(limit)s

-- name: drop_totals
DELETE FROM emissions.total WHERE tenant = %(tenant)s AND module = %(module)s AND year = %(year)s

-- name: put_totals
INSERT INTO emissions.total (tenant, module, year, organisation_unit, activity, kg_co2e, rows, computed_by)
SELECT %(tenant)s, %(module)s, %(year)s, row.organisation_unit, row.activity, row.kg_co2e, row.rows, %(job_id)s
FROM unnest(%(organisation_units)s::text[], %(activities)s::text[], %(amounts)s::numeric[], %(rows)s::bigint[])
    AS row (organisation_unit, activity, kg_co2e, rows)
