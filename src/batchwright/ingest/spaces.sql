-- Spaces: the vectors of one embedder in one collection, and the words of chunks.

-- part: space_columns
space.id, space.collection_id, space.fingerprint, space.model, space.dimensions, space.has_table

-- name: pgvector
SELECT coalesce(installed.extversion, available.default_version), installed.oid IS NOT NULL,
       quote_ident(namespace.nspname),
       (SELECT type.oid::bigint FROM pg_type AS type WHERE type.typname = 'vector' AND type.typnamespace = namespace.oid)
FROM pg_available_extensions AS available
LEFT JOIN pg_extension AS installed ON installed.extname = available.name
LEFT JOIN pg_namespace AS namespace ON namespace.oid = installed.extnamespace
WHERE available.name = 'vector'

-- name: find
SELECT :space_columns
FROM batchwright.ingest_space AS space
WHERE space.collection_id = %(collection_id)s AND space.fingerprint = %(fingerprint)s

-- name: insert
INSERT INTO batchwright.ingest_space AS space (collection_id, fingerprint, model, dimensions, has_table, created_at)
SELECT collection.id, %(fingerprint)s, %(model)s, %(dimensions)s, %(has_table)s, :now
FROM batchwright.ingest_collection AS collection
WHERE collection.id = %(collection_id)s AND collection.deleted_at IS NULL
ON CONFLICT (collection_id, fingerprint) DO NOTHING
RETURNING :space_columns

-- name: of_collection
SELECT :space_columns
FROM batchwright.ingest_space AS space
WHERE space.collection_id = %(collection_id)s
ORDER BY space.id

-- name: with_table
SELECT :space_columns FROM batchwright.ingest_space AS space WHERE space.has_table ORDER BY space.id DESC

-- name: of_version
SELECT :space_columns
FROM batchwright.ingest_version AS version
JOIN batchwright.ingest_space AS space ON space.collection_id = version.collection_id
WHERE version.id = %(version_id)s
ORDER BY space.id

-- While a transaction writes vectors, their space must not be dropped.
-- name: hold
SELECT space.id FROM batchwright.ingest_space AS space WHERE space.id = %(space_id)s FOR KEY SHARE

-- name: lock
SELECT space.id FROM batchwright.ingest_space AS space WHERE space.id = %(space_id)s FOR UPDATE

-- name: count_change
UPDATE batchwright.ingest_space SET changes = changes + 1 WHERE id = %(space_id)s RETURNING changes

-- name: remove
DELETE FROM batchwright.ingest_space WHERE id = %(space_id)s RETURNING id

-- Spaces that a newer one of the same collection has replaced.
-- name: outdated
SELECT :space_columns
FROM batchwright.ingest_space AS space
WHERE space.created_at < :now - make_interval(secs => %(keep_seconds)s::float8)
    AND EXISTS (
        SELECT FROM batchwright.ingest_space AS newer
        WHERE newer.collection_id = space.collection_id AND newer.id > space.id)
ORDER BY space.id
LIMIT %(limit)s

-- Without pgvector --------------------------------------------------------------------------------------------------

-- name: add
INSERT INTO batchwright.ingest_vector (space_id, chunk_id, embedding)
SELECT %(space_id)s, added.chunk_id, added.embedding
FROM unnest(%(chunk_ids)s::bigint[], %(embeddings)s::bytea[]) AS added (chunk_id, embedding)
ON CONFLICT (space_id, chunk_id) DO NOTHING

-- name: remove_vectors
DELETE FROM batchwright.ingest_vector AS vector
USING batchwright.ingest_chunk AS chunk
WHERE chunk.version_id = %(version_id)s AND vector.space_id = %(space_id)s AND vector.chunk_id = chunk.id

-- name: has_vectors
SELECT EXISTS (SELECT FROM batchwright.ingest_vector WHERE space_id = %(space_id)s)

-- name: remove_page
DELETE FROM batchwright.ingest_vector
WHERE space_id = %(space_id)s AND chunk_id IN (
    SELECT chunk_id FROM batchwright.ingest_vector WHERE space_id = %(space_id)s ORDER BY chunk_id LIMIT %(limit)s)
RETURNING chunk_id

-- Words -------------------------------------------------------------------------------------------------------------

-- Headings weigh more than text. The lexeme of the collection contains a space, which no word does.
-- A page of chunks, by their numbers.
-- name: index_words
UPDATE batchwright.ingest_chunk AS chunk SET
    words = setweight(to_tsvector(collection.language::regconfig, array_to_string(chunk.section, ' ')), 'B')
        || to_tsvector(collection.language::regconfig, chunk.text)
        || array_to_tsvector(ARRAY['c ' || chunk.collection_id])
FROM batchwright.ingest_collection AS collection
WHERE chunk.version_id = %(version_id)s AND collection.id = chunk.collection_id
    AND chunk.number BETWEEN %(first)s AND %(last)s
RETURNING octet_length(chunk.text)

-- name: note_size
UPDATE batchwright.ingest_version SET chunk_count = %(chunks)s, text_bytes = %(bytes)s
WHERE id = %(version_id)s
RETURNING id

-- name: unindex_words
UPDATE batchwright.ingest_chunk SET words = NULL
WHERE version_id = %(version_id)s AND number BETWEEN %(first)s AND %(last)s
RETURNING number

-- New words are kept in a pending list, which every search reads, until there are many.
-- name: clean_words
SELECT gin_clean_pending_list('batchwright.ingest_chunk_words')
