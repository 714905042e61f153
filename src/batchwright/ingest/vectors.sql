-- The table of one space, with pgvector: `:table`, and the operators and types in `:home`, the schema of the extension.

-- Search scans all new vectors. Upkeep puts them into the index, which takes a hundred times as long as storing them.
-- name: create_table
CREATE TABLE :table (chunk_id bigint PRIMARY KEY, is_indexed boolean NOT NULL DEFAULT false, embedding :type(:dimensions) NOT NULL)

-- name: create_index_of_new
CREATE INDEX ON :table (chunk_id) WHERE NOT is_indexed

-- name: create_index
CREATE INDEX ON :table USING hnsw (embedding :operators) WHERE is_indexed

-- name: drop_table
DROP TABLE IF EXISTS :table

-- name: add
INSERT INTO :table (chunk_id, embedding)
SELECT added.chunk_id, CAST(added.embedding AS :type)
FROM unnest(%(chunk_ids)s::bigint[], CAST(%(embeddings)s AS :home.vector[])) AS added (chunk_id, embedding)
ON CONFLICT (chunk_id) DO NOTHING

-- name: settle
UPDATE :table SET is_indexed = true
WHERE chunk_id IN (
    SELECT chunk_id FROM :table WHERE NOT is_indexed ORDER BY chunk_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
RETURNING chunk_id

-- name: remove_vectors
DELETE FROM :table AS vector
USING batchwright.ingest_chunk AS chunk
WHERE chunk.version_id = %(version_id)s AND vector.chunk_id = chunk.id

-- name: has_vectors
SELECT EXISTS (SELECT FROM :table)

-- Search ------------------------------------------------------------------------------------------------------------

-- part: query
CAST(CAST(%(query)s AS :home.vector) AS :type)

-- part: distance
vector.embedding OPERATOR(:home.<=>) :query

-- name: nearest
(SELECT vector.chunk_id, :distance AS distance FROM :table AS vector WHERE vector.is_indexed
 ORDER BY :distance LIMIT %(limit)s)
UNION ALL
(SELECT vector.chunk_id, :distance FROM :table AS vector WHERE NOT vector.is_indexed
 ORDER BY :distance LIMIT %(limit)s)
ORDER BY distance, chunk_id
LIMIT %(limit)s

-- For a filter that few chunks pass.
-- name: nearest_among
SELECT vector.chunk_id, :distance AS distance
FROM unnest(%(chunk_ids)s::bigint[]) AS allowed (chunk_id)
JOIN :table AS vector ON vector.chunk_id = allowed.chunk_id
ORDER BY distance, vector.chunk_id
LIMIT %(limit)s

-- For a filter that many chunks pass: the index scan continues until enough have passed.
-- name: nearest_passing
(SELECT vector.chunk_id, :distance AS distance FROM :table AS vector
 WHERE vector.is_indexed AND EXISTS (SELECT :chunk_of_vector)
 ORDER BY :distance LIMIT %(limit)s)
UNION ALL
(SELECT vector.chunk_id, :distance FROM :table AS vector
 WHERE NOT vector.is_indexed AND EXISTS (SELECT :chunk_of_vector)
 ORDER BY :distance LIMIT %(limit)s)
ORDER BY distance, chunk_id
LIMIT %(limit)s

-- Export ------------------------------------------------------------------------------------------------------------

-- name: read
SELECT vector.chunk_id, CAST(CAST(vector.embedding AS :home.vector) AS real[])
FROM unnest(%(chunk_ids)s::bigint[]) AS wanted (chunk_id)
JOIN :table AS vector ON vector.chunk_id = wanted.chunk_id
