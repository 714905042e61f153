-- Vectors without pgvector: search reads all of them.

-- name: changes
SELECT changes FROM batchwright.ingest_space WHERE id = %(space_id)s

-- name: ids
SELECT chunk_id FROM batchwright.ingest_vector WHERE space_id = %(space_id)s ORDER BY chunk_id

-- name: page
SELECT chunk_id, embedding FROM batchwright.ingest_vector
WHERE space_id = %(space_id)s AND chunk_id > %(after)s
ORDER BY chunk_id
LIMIT %(limit)s

-- name: read
SELECT vector.chunk_id, vector.embedding
FROM unnest(%(chunk_ids)s::bigint[]) AS wanted (chunk_id)
JOIN batchwright.ingest_vector AS vector ON vector.space_id = %(space_id)s AND vector.chunk_id = wanted.chunk_id
ORDER BY vector.chunk_id
