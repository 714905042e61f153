-- Dashboard sessions: only the hash of a session's token is stored.

-- name: open
-- A session lasts no longer than its key.
INSERT INTO batchwright.web_session (digest, key_id, created_at, expires_at)
SELECT %(digest)s, api_key.id, :now, least(:now + make_interval(secs => %(lifetime_seconds)s), api_key.expires_at)
FROM batchwright.api_key
WHERE api_key.id = %(key_id)s
RETURNING expires_at

-- name: sweep
-- Remove some expired sessions; the next sign-in finds more.
DELETE FROM batchwright.web_session
WHERE digest IN (
    SELECT digest FROM batchwright.web_session WHERE expires_at <= :now LIMIT %(limit)s FOR UPDATE SKIP LOCKED)

-- name: find
SELECT api_key.id, api_key.tenant, api_key.scopes, api_key.name
FROM batchwright.web_session
JOIN batchwright.api_key ON api_key.id = web_session.key_id
WHERE web_session.digest = %(digest)s AND web_session.expires_at > :now
    AND api_key.revoked_at IS NULL AND (api_key.expires_at IS NULL OR api_key.expires_at > :now)

-- name: close
DELETE FROM batchwright.web_session WHERE digest = %(digest)s
