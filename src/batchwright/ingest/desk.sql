-- name: has_documents
SELECT EXISTS (SELECT FROM batchwright.ingest_collection) OR EXISTS (SELECT FROM batchwright.ingest_answer)
