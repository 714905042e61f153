-- The queries of an estimate.

-- The sources among these whose live version has the same content and recipe.
-- name: unchanged
SELECT document.source
FROM jsonb_to_recordset(%(listed)s::jsonb) AS listed (source text, etag text)
JOIN batchwright.ingest_collection AS collection
    ON collection.tenant = %(tenant)s AND collection.name = %(collection)s AND collection.deleted_at IS NULL
JOIN batchwright.ingest_document AS document
    ON document.collection_id = collection.id AND md5(document.source) = md5(listed.source)
JOIN batchwright.ingest_version AS version ON version.id = document.live_version
WHERE document.etag = listed.etag AND version.recipe = %(recipe)s
