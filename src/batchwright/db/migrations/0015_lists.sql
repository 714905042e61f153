-- Lists by status, and over all tenants, find their page in an index, however many other jobs there are.
-- serves: 0.1.0

-- The list's question without a tenant: which jobs came before that one? Written once for each job, as its table is.
CREATE INDEX listing_age ON batchwright.listing (created_at, id);

-- Which jobs that failed came before that one? Only those that fail are written here, when they do.
CREATE INDEX job_failed ON batchwright.job (created_at, id) WHERE status = 'FAILED';

-- Which batches and tasks of a tenant have this status?
CREATE INDEX batch_status ON batchwright.batch (tenant, status, id);
CREATE INDEX task_status ON batchwright.task (tenant, status, id);
