-- Requests by their Idempotency-Key. The transaction that enqueues the jobs also takes the key and stores the answer.

-- name: take
INSERT INTO batchwright.api_request (tenant, key, digest, answer, created_at)
VALUES (%(tenant)s, %(key)s, %(digest)s, '[]', :now)
ON CONFLICT DO NOTHING
RETURNING key

-- name: known
SELECT digest, answer FROM batchwright.api_request WHERE tenant = %(tenant)s AND key = %(key)s

-- name: answer
UPDATE batchwright.api_request SET answer = %(answer)s::jsonb WHERE tenant = %(tenant)s AND key = %(key)s
