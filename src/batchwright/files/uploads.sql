-- Uploads and their parts. Users can only change an upload that is pending and has not expired.

-- part: columns
id, tenant, CASE WHEN status = 'pending' AND expires_at <= :now THEN 'expired' ELSE status::text END, purpose, filename,
bytes, expires_seconds, part_ids, file_id, created_at, expires_at

-- name: insert
INSERT INTO batchwright.upload (id, tenant, purpose, filename, mime_type, bytes, expires_seconds, created_at, expires_at, over_at)
VALUES (
    %(id)s, %(tenant)s, %(purpose)s, %(filename)s, %(mime_type)s, %(bytes)s, %(expires_seconds)s, :now,
    :now + make_interval(secs => %(open_seconds)s), :now + make_interval(secs => %(open_seconds)s))
ON CONFLICT DO NOTHING
RETURNING id

-- name: get
SELECT :columns FROM batchwright.upload WHERE id = %(id)s AND tenant = %(tenant)s

-- Locks the row of the upload, so that no part is added after its end. The limit of twice its bytes allows for parts
-- that are resent.
-- name: add_part
WITH room AS (
    UPDATE batchwright.upload SET parts = parts + 1, part_bytes = part_bytes + %(bytes)s
    WHERE id = %(upload_id)s AND tenant = %(tenant)s AND status = 'pending' AND expires_at > :now
        AND parts < %(parts_max)s AND part_bytes + %(bytes)s <= 2 * bytes
        AND NOT EXISTS (SELECT FROM batchwright.upload_part AS part WHERE part.id = %(id)s)
    RETURNING id
)
INSERT INTO batchwright.upload_part (id, upload_id, bytes, key, created_at)
SELECT %(id)s, room.id, %(bytes)s, %(key)s, :now FROM room
RETURNING id, upload_id, bytes, key, created_at

-- name: part
SELECT id, upload_id, bytes, key, created_at FROM batchwright.upload_part WHERE id = %(id)s AND upload_id = %(upload_id)s

-- name: parts
SELECT id, upload_id, bytes, key, created_at
FROM batchwright.upload_part
WHERE upload_id = %(upload_id)s AND id = ANY(%(ids)s)

-- name: complete
UPDATE batchwright.upload SET status = 'completed', file_id = %(file_id)s, part_ids = %(part_ids)s, over_at = :now
WHERE id = %(id)s AND tenant = %(tenant)s AND status = 'pending' AND expires_at > :now
RETURNING :columns

-- name: cancel
UPDATE batchwright.upload SET status = 'cancelled', over_at = :now
WHERE id = %(id)s AND tenant = %(tenant)s AND status = 'pending' AND expires_at > :now
RETURNING :columns

-- name: expire
UPDATE batchwright.upload SET status = 'expired'
WHERE id = ANY(ARRAY(
    SELECT id FROM batchwright.upload
    WHERE parts_gone_at IS NULL AND over_at <= :now AND status = 'pending'
    ORDER BY over_at, id
    LIMIT %(limit)s
    FOR NO KEY UPDATE SKIP LOCKED
))
RETURNING id
