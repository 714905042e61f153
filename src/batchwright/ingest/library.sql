-- Processed documents: versions with their chunks and mentions. Search finds only the live version.

-- An earlier attempt of the same item may have left a version behind.
-- name: drop_staged
DELETE FROM batchwright.ingest_version
WHERE item_id = %(item_id)s AND generation = %(generation)s AND state = 'staged'
RETURNING id

-- name: add_version
INSERT INTO batchwright.ingest_version (
    document_id, collection_id, item_id, generation, recipe, sha256, steps, metadata, created_at)
VALUES (
    %(document_id)s, %(collection_id)s, %(item_id)s, %(generation)s, %(recipe)s, %(sha256)s, %(steps)s::jsonb,
    %(metadata)s::jsonb, :now)
RETURNING id

-- name: add_chunks
INSERT INTO batchwright.ingest_chunk (
    version_id, collection_id, number, key, hash, char_start, char_end, overlap, page_first, page_last, section, tokens, text)
SELECT %(version_id)s, %(collection_id)s, given.number, given.key, decode(given.hash, 'hex'), given.char_start, given.char_end,
       given.overlap, given.page_first, given.page_last, given.section, given.tokens, given.text
FROM jsonb_to_recordset(%(chunks)s::jsonb) AS given (
    number integer, key text, hash text, char_start integer, char_end integer, overlap integer, page_first integer,
    page_last integer, section text[], tokens integer, text text)
RETURNING number, id

-- name: add_mentions
INSERT INTO batchwright.ingest_mention (version_id, chunk_id, type, text, char_start, char_end)
SELECT %(version_id)s, given.chunk_id, given.type, given.text, given.char_start, given.char_end
FROM jsonb_to_recordset(%(mentions)s::jsonb) AS given (
    chunk_id bigint, type text, text text, char_start integer, char_end integer)

-- name: chunks
SELECT id, hash FROM batchwright.ingest_chunk WHERE version_id = %(version_id)s ORDER BY number

-- The document, locked until the transaction ends.
-- name: lock_document
SELECT live_version FROM batchwright.ingest_document WHERE id = %(document_id)s FOR NO KEY UPDATE

-- Whether the bytes of a version were fetched after those of another. A removed run has no steps.
-- name: is_fetched_later
SELECT coalesce(theirs.ended_at, live.created_at) > mine.ended_at
FROM batchwright.ingest_version AS live
JOIN batchwright.ingest_version AS version ON version.id = %(version_id)s
JOIN batchwright.ingest_step AS mine
    ON mine.item_id = version.item_id AND mine.generation = version.generation AND mine.step = 'FETCHED'
LEFT JOIN batchwright.ingest_step AS theirs
    ON theirs.item_id = live.item_id AND theirs.generation = live.generation AND theirs.step = 'FETCHED'
WHERE live.id = %(before)s

-- name: retire
UPDATE batchwright.ingest_version SET state = 'retired', retired_at = :now
WHERE id = %(version_id)s AND state = 'live'
RETURNING id

-- name: enliven
UPDATE batchwright.ingest_version SET state = 'live'
WHERE id = %(version_id)s AND state = 'staged'
RETURNING id

-- The etag belongs to another version until the new one is finished.
-- name: point
UPDATE batchwright.ingest_document SET live_version = %(version_id)s, etag = NULL, name = coalesce(%(name)s, name),
    updated_at = :now
WHERE id = %(document_id)s
RETURNING id

-- From now on, the etag of the fetched source counts as processed.
-- name: finish
UPDATE batchwright.ingest_document SET etag = %(etag)s, updated_at = :now
WHERE id = %(document_id)s AND live_version = %(version_id)s
RETURNING id

-- name: note_steps
UPDATE batchwright.ingest_version SET steps = %(steps)s::jsonb WHERE id = %(version_id)s RETURNING id

-- Upkeep ------------------------------------------------------------------------------------------------------------

-- Unused versions: retired ones, and staged ones whose items have ended, started over or are gone.
-- name: unused
SELECT version.id, version.document_id, version.collection_id, version.steps -> 'CONTENT_EXTRACTED' -> 'output' ->> 'text_key'
FROM batchwright.ingest_version AS version
WHERE (version.state = 'retired' AND version.retired_at < :now - make_interval(secs => %(keep_seconds)s::float8))
    OR (version.state = 'staged' AND version.created_at < :now - make_interval(secs => %(keep_seconds)s::float8)
        AND NOT EXISTS (
            SELECT FROM batchwright.ingest_item AS item
            WHERE item.id = version.item_id AND item.generation = version.generation
                AND item.status IN ('OPEN', 'FAILED', 'CANCELLED')))
ORDER BY version.id
LIMIT %(limit)s

-- name: remove_version
DELETE FROM batchwright.ingest_version WHERE id = %(version_id)s AND state <> 'live' RETURNING id

-- Whether a text is still in use: by a version, or by an item that may need it again.
-- name: is_text_used
SELECT EXISTS (
    SELECT FROM batchwright.ingest_version
    WHERE document_id = %(document_id)s AND steps -> 'CONTENT_EXTRACTED' -> 'output' ->> 'text_key' = %(text_key)s
) OR EXISTS (
    SELECT FROM batchwright.ingest_item AS item
    JOIN batchwright.ingest_step AS step ON step.item_id = item.id AND step.generation = item.generation
    WHERE item.document_id = %(document_id)s AND item.status IN ('OPEN', 'FAILED', 'CANCELLED')
        AND step.step = 'CONTENT_EXTRACTED' AND step.output ->> 'text_key' = %(text_key)s
)
