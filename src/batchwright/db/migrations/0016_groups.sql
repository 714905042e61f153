-- What lists and inboxes still had to look for among all rows, they find in an index.
-- serves: 0.1.0

-- The inbox's question: which groups are there, and what failed last in each?
DROP INDEX batchwright.job_inbox;
CREATE INDEX job_inbox ON batchwright.job (tenant, job_type, (coalesce(error ->> 'code', '')), finished_at)
    WHERE status = 'FAILED' AND dismissed_at IS NULL;

-- The children of a job, page by page: the next page does not sort those that are left.
DROP INDEX batchwright.job_children;
CREATE INDEX job_children ON batchwright.job (parent_job_id, round, id) WHERE parent_job_id IS NOT NULL;

-- Is anything open in this pipeline? Only chained jobs are written here.
CREATE INDEX job_pipeline_open ON batchwright.job (pipeline_id)
    WHERE parent_job_id IS NULL AND pipeline_id <> id AND finished_at IS NULL;

-- Which causes are there, in which runs, and what failed last?
DROP INDEX batchwright.ingest_item_inbox;
CREATE INDEX ingest_item_inbox ON batchwright.ingest_item (tenant, cause, run_id, id)
    WHERE status = 'FAILED' AND dismissed_at IS NULL;

-- Which runs of a tenant have this status, and which of a collection?
CREATE INDEX ingest_run_status ON batchwright.ingest_run (tenant, status, id);
DROP INDEX batchwright.ingest_run_of_collection;
CREATE INDEX ingest_run_of_collection ON batchwright.ingest_run (collection_id, status, id);

-- Which open tasks wait for something, and which were just told to end?
CREATE INDEX task_waiting ON batchwright.task (tenant, id) WHERE ended_at IS NULL AND waiting_message IS NOT NULL;
CREATE INDEX task_cancelling ON batchwright.task (cancel_requested_at)
    WHERE ended_at IS NULL AND cancel_requested_at IS NOT NULL;

-- Which files of a tenant are for this purpose, and which keys does it have?
CREATE INDEX file_purpose ON batchwright.file (tenant, purpose, id) WHERE deleted_at IS NULL;
CREATE INDEX api_key_listed ON batchwright.api_key (tenant, created_at, id);
