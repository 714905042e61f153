-- Files by id and tenant; their bytes are in the store.

-- name: insert
INSERT INTO batchwright.file (id, tenant, purpose, filename, bytes, sha256, key, idempotency_key, created_at, expires_at)
VALUES (
    %(id)s, %(tenant)s, %(purpose)s, %(filename)s, %(bytes)s, %(sha256)s, %(key)s, %(idempotency_key)s, :now,
    :now + make_interval(secs => %(expires_seconds)s))
ON CONFLICT DO NOTHING
RETURNING id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at

-- The row that blocked the insert: the same row, from a call whose answer was lost, or the one that has the key.
-- name: known
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE id = %(id)s OR (tenant = %(tenant)s AND idempotency_key = %(idempotency_key)s)
ORDER BY id <> %(id)s
LIMIT 1

-- Free the key of an expired file, so that an upload never returns that file.
-- name: free_idempotency_key
UPDATE batchwright.file SET idempotency_key = NULL
WHERE tenant = %(tenant)s AND idempotency_key = %(idempotency_key)s AND expires_at <= :now
RETURNING id

-- name: get
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE id = %(id)s AND tenant = coalesce(%(tenant)s, tenant)
    AND (%(also_gone)s OR (deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)))

-- The names of files, including those that are deleted or expired.
-- name: names
SELECT id, filename FROM batchwright.file WHERE id = ANY(%(ids)s)

-- Written so that only the index on tenant and id can serve it: with the index on ids alone, a list for a tenant with
-- few files would read those of all other tenants.
-- name: list_newest
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE (tenant, id) < (%(tenant)s, coalesce(%(after)s, 'g')) AND tenant >= %(tenant)s
    AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
ORDER BY tenant DESC, id DESC
LIMIT %(limit)s

-- name: list_oldest
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE (tenant, id) > (%(tenant)s, coalesce(%(after)s, '')) AND tenant <= %(tenant)s
    AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
ORDER BY tenant, id
LIMIT %(limit)s

-- name: list_newest_of_purpose
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE (tenant, purpose, id) < (%(tenant)s, %(purpose)s, coalesce(%(after)s, 'g'))
    AND (tenant, purpose) >= (%(tenant)s, %(purpose)s)
    AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
ORDER BY tenant DESC, purpose DESC, id DESC
LIMIT %(limit)s

-- name: list_oldest_of_purpose
SELECT id, tenant, purpose, filename, bytes, sha256, key, created_at, expires_at
FROM batchwright.file
WHERE (tenant, purpose, id) > (%(tenant)s, %(purpose)s, coalesce(%(after)s, ''))
    AND (tenant, purpose) <= (%(tenant)s, %(purpose)s)
    AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
ORDER BY tenant, purpose, id
LIMIT %(limit)s

-- name: delete
UPDATE batchwright.file SET deleted_at = :now, idempotency_key = NULL
WHERE id = %(id)s AND tenant = %(tenant)s AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
RETURNING id
