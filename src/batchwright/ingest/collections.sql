-- Collections: their contents, and their deletion.

-- part: collection_columns
collection.id, collection.tenant, collection.name, collection.language, sizes.documents, sizes.chunks, sizes.text_bytes, sizes.is_more,
ARRAY(
    SELECT jsonb_build_object('id', space.id, 'collection_id', space.collection_id, 'fingerprint', space.fingerprint,
        'model', space.model, 'dimensions', space.dimensions, 'has_table', space.has_table)
    FROM batchwright.ingest_space AS space WHERE space.collection_id = collection.id ORDER BY space.id),
collection.created_at, sizes.updated_at

-- Sums over an index only, and over a bounded number of documents. A range in the index's order forces the planner to
-- use this index.
-- part: with_sizes
CROSS JOIN LATERAL (
    SELECT least(count(*), %(counted)s) AS documents, coalesce(sum(live.chunk_count), 0)::bigint AS chunks,
        coalesce(sum(live.text_bytes), 0)::bigint AS text_bytes, count(*) > %(counted)s AS is_more,
        max(live.created_at) AS updated_at
    FROM (
        SELECT version.chunk_count, version.text_bytes, version.created_at
        FROM batchwright.ingest_version AS version
        WHERE version.collection_id BETWEEN collection.id AND collection.id AND version.state = 'live'
        ORDER BY version.collection_id
        LIMIT %(counted)s + 1
    ) AS live
) AS sizes

-- name: list
SELECT :collection_columns
FROM batchwright.ingest_collection AS collection :with_sizes
WHERE collection.tenant = %(tenant)s AND collection.deleted_at IS NULL AND collection.name > %(after)s
ORDER BY collection.name
LIMIT %(limit)s

-- name: list_everywhere
SELECT :collection_columns
FROM batchwright.ingest_collection AS collection :with_sizes
WHERE collection.deleted_at IS NULL AND (collection.tenant, collection.name) > (%(after_tenant)s, %(after)s)
ORDER BY collection.tenant, collection.name
LIMIT %(limit)s

-- name: get
SELECT :collection_columns
FROM batchwright.ingest_collection AS collection :with_sizes
WHERE collection.tenant = %(tenant)s AND collection.name = %(name)s AND collection.deleted_at IS NULL

-- name: find
SELECT id FROM batchwright.ingest_collection
WHERE tenant = %(tenant)s AND name = %(name)s AND deleted_at IS NULL

-- part: document_columns
document.id, document.source, document.name, version.id, version.chunk_count, version.text_bytes, version.metadata,
document.created_at, document.updated_at

-- name: documents
SELECT :document_columns
FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_version AS version ON version.id = document.live_version
WHERE document.collection_id = %(collection_id)s AND document.id > %(after)s
ORDER BY document.id
LIMIT %(limit)s

-- name: document
SELECT :document_columns
FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_version AS version ON version.id = document.live_version
WHERE document.collection_id = %(collection_id)s AND document.id = %(document_id)s

-- name: chunks
SELECT chunk.id, chunk.number, chunk.page_first, chunk.page_last, chunk.section, chunk.char_start, chunk.char_end,
    chunk.tokens, chunk.text
FROM batchwright.ingest_chunk AS chunk
WHERE chunk.version_id = %(version_id)s AND chunk.number > %(after)s
ORDER BY chunk.number
LIMIT %(limit)s

-- name: language
SELECT cfgname FROM pg_ts_config WHERE cfgname = %(language)s AND pg_ts_config_is_visible(oid) LIMIT 1

-- Deletion ----------------------------------------------------------------------------------------------------------

-- Waits for a transaction that starts a run in the collection, because that one locks the row.
-- name: lock
SELECT id FROM batchwright.ingest_collection
WHERE tenant = %(tenant)s AND name = %(name)s AND deleted_at IS NULL
FOR UPDATE

-- name: open_run
SELECT id FROM batchwright.ingest_run WHERE collection_id = %(collection_id)s AND ended_at IS NULL ORDER BY id LIMIT 1

-- name: mark_deleted
UPDATE batchwright.ingest_collection SET deleted_at = :now WHERE id = %(collection_id)s RETURNING id

-- name: lock_document
SELECT document.live_version FROM batchwright.ingest_document AS document
WHERE document.collection_id = %(collection_id)s AND document.id = %(document_id)s
FOR NO KEY UPDATE

-- name: retire
WITH retired AS (
    UPDATE batchwright.ingest_version SET state = 'retired', retired_at = :now
    WHERE id = %(version_id)s AND state = 'live'
    RETURNING document_id
)
UPDATE batchwright.ingest_document AS document SET live_version = NULL, etag = NULL, updated_at = :now
FROM retired
WHERE document.id = retired.document_id
RETURNING document.id

-- The row of a collection stays as long as its runs are kept.
-- name: deleted
SELECT collection.id
FROM batchwright.ingest_collection AS collection
WHERE collection.deleted_at IS NOT NULL
    AND NOT EXISTS (
        SELECT FROM batchwright.ingest_run AS run WHERE run.collection_id = collection.id AND run.ended_at IS NULL)
    AND (EXISTS (SELECT FROM batchwright.ingest_document AS document WHERE document.collection_id = collection.id)
        OR EXISTS (SELECT FROM batchwright.ingest_space AS space WHERE space.collection_id = collection.id)
        OR NOT EXISTS (SELECT FROM batchwright.ingest_run AS run WHERE run.collection_id = collection.id))
ORDER BY collection.id
LIMIT 1

-- name: remove_chunks
DELETE FROM batchwright.ingest_chunk WHERE id IN (
    SELECT chunk.id
    FROM batchwright.ingest_version AS version
    JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = version.id
    WHERE version.document_id = %(document_id)s
    LIMIT %(limit)s)
RETURNING id

-- name: remove_document
DELETE FROM batchwright.ingest_document WHERE id = %(document_id)s RETURNING id

-- name: first_documents
SELECT id FROM batchwright.ingest_document WHERE collection_id = %(collection_id)s ORDER BY id LIMIT %(limit)s

-- name: remove_collection
DELETE FROM batchwright.ingest_collection AS collection
WHERE collection.id = %(collection_id)s AND collection.deleted_at IS NOT NULL
    AND NOT EXISTS (SELECT FROM batchwright.ingest_run AS run WHERE run.collection_id = collection.id)
RETURNING collection.id
