-- Headers of a batch's creator that are passed on to the model server.
-- serves: 0.1.0

-- Encrypted by a key that is not in the database, and bound to the batch's family. A retry has those of its batch.
ALTER TABLE batchwright.batch
    ADD COLUMN sealed_headers bytea,
    DROP CONSTRAINT batch_waiting_reason_check,
    ADD CONSTRAINT batch_waiting_reason_check CHECK (waiting_reason IN ('disk', 'key', 'store'));
