-- Whether a chunk passes the filters; shared by search over words and over vectors.

-- part: passes
chunk.collection_id = %(collection_id)s AND chunk.words IS NOT NULL AND version.metadata @> %(metadata)s::jsonb
AND (%(source)s::text IS NULL OR document.source LIKE %(source)s)
AND (%(name)s::text IS NULL OR document.name LIKE %(name)s)
AND (%(page)s::integer IS NULL OR %(page)s BETWEEN chunk.page_first AND coalesce(chunk.page_last, chunk.page_first))
AND (%(entity)s::text IS NULL OR EXISTS (
    SELECT FROM batchwright.ingest_mention AS mention WHERE mention.chunk_id = chunk.id AND mention.type = %(entity)s))

-- part: with_document
JOIN batchwright.ingest_version AS version ON version.id = chunk.version_id
JOIN batchwright.ingest_document AS document ON document.id = version.document_id

-- part: chunk_of_vector
FROM batchwright.ingest_chunk AS chunk :with_document
WHERE chunk.id = vector.chunk_id AND :passes
OFFSET 0
