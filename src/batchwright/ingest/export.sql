-- Export: live documents in the order of their ids, and the chunks of their versions.

-- name: collection
SELECT id FROM batchwright.ingest_collection
WHERE tenant = %(tenant)s AND name = %(name)s AND deleted_at IS NULL

-- name: documents
SELECT document.id, document.source, document.name, version.id, coalesce(version.chunk_count, %(page)s), version.metadata
FROM batchwright.ingest_document AS document
JOIN batchwright.ingest_version AS version ON version.id = document.live_version
WHERE document.collection_id = %(collection_id)s AND document.id > %(after)s
ORDER BY document.id
LIMIT %(page)s

-- The chunks of one version after a number, or all chunks of several versions.
-- name: chunks
SELECT chunk.id, chunk.version_id, chunk.number, chunk.page_first, chunk.page_last, chunk.section, chunk.char_start,
    chunk.char_end, chunk.text,
    ARRAY(
        SELECT jsonb_build_object('type', mention.type, 'text', mention.text,
            'char_start', mention.char_start, 'char_end', mention.char_end)
        FROM batchwright.ingest_mention AS mention
        WHERE mention.chunk_id = chunk.id
        ORDER BY mention.char_start
        LIMIT %(mentions)s)
FROM unnest(%(versions)s::bigint[]) WITH ORDINALITY AS wanted (version_id, place)
JOIN batchwright.ingest_chunk AS chunk ON chunk.version_id = wanted.version_id
WHERE chunk.number > %(after)s
ORDER BY wanted.place, chunk.number
LIMIT %(limit)s

-- name: vectors
SELECT vector.chunk_id, vector.embedding
FROM unnest(%(chunk_ids)s::bigint[]) AS wanted (chunk_id)
JOIN batchwright.ingest_vector AS vector ON vector.space_id = %(space_id)s AND vector.chunk_id = wanted.chunk_id
