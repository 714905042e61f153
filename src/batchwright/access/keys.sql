-- API keys: only their hash is stored.

-- name: create
-- An id that is there already comes from the same form, sent twice: only the secret that was shown last is valid.
INSERT INTO batchwright.api_key (id, digest, hint, name, tenant, scopes, created_at, expires_at)
VALUES (%(id)s, %(digest)s, %(hint)s, %(name)s, %(tenant)s, %(scopes)s::text[], :now,
        :now + make_interval(secs => %(lifetime_seconds)s))
ON CONFLICT (id) DO UPDATE SET digest = excluded.digest, hint = excluded.hint
WHERE api_key.last_used_at IS NULL AND api_key.revoked_at IS NULL
    AND (api_key.name, api_key.tenant, api_key.scopes) = (excluded.name, excluded.tenant, excluded.scopes)
RETURNING id, name, tenant, scopes, hint, created_at, expires_at, last_used_at, revoked_at

-- name: list
-- The keys of one tenant, or of all, in the order of the index: by tenant, then by age.
SELECT id, name, tenant, scopes, hint, created_at, expires_at, last_used_at, revoked_at
FROM (
    (
        SELECT api_key.* FROM batchwright.api_key WHERE tenant = %(tenant)s ORDER BY tenant, created_at, id LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT api_key.* FROM batchwright.api_key
        WHERE %(tenant)s::text IS NULL ORDER BY tenant, created_at, id LIMIT %(limit)s
    )
) AS key
ORDER BY tenant, created_at, id

-- name: revoke
UPDATE batchwright.api_key SET revoked_at = coalesce(revoked_at, :now)
WHERE id = %(id)s
RETURNING id, name, tenant, scopes, hint, created_at, expires_at, last_used_at, revoked_at

-- name: find
-- The last use is recorded at most once a minute, so that a busy key does not mean constant row updates.
WITH found AS (
    SELECT id, tenant, scopes, last_used_at FROM batchwright.api_key
    WHERE digest = %(digest)s AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now)
),
used AS (
    UPDATE batchwright.api_key SET last_used_at = :now
    FROM found
    WHERE api_key.id = found.id AND (found.last_used_at IS NULL OR found.last_used_at < :now - interval '1 minute')
)
SELECT id, tenant, scopes FROM found

-- name: live
SELECT EXISTS (
    SELECT FROM batchwright.api_key
    WHERE id = %(id)s AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now))

-- name: any
SELECT EXISTS (SELECT FROM batchwright.api_key)
