-- What `batchwright batch run` needs to resume a batch of its own, and by which its users know it: the file, the server,
-- and where the answers go.
-- serves: 0.1.0
ALTER TABLE batchwright.batch ADD COLUMN origin jsonb;
