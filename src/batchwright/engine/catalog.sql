-- The operations that workers have published.

-- name: publish
INSERT INTO batchwright.operation (name, payload_schema, defaults, description, published_at, published_by)
SELECT name, payload_schema, defaults, description, :now, %(worker)s
FROM jsonb_to_recordset(%(operations)s::jsonb) AS input (
    name text, payload_schema jsonb, defaults jsonb, description text)
ORDER BY name
ON CONFLICT (name) DO UPDATE SET
    payload_schema = excluded.payload_schema, defaults = excluded.defaults, description = excluded.description,
    published_at = excluded.published_at, published_by = excluded.published_by

-- name: published
SELECT name, payload_schema, defaults, description FROM batchwright.operation ORDER BY name
