-- Batches whose requests an outside provider answers.
-- serves: 0.1.0

-- They may wait for a credential that the provider refuses.
ALTER TABLE batchwright.batch
    DROP CONSTRAINT batch_waiting_reason_check,
    ADD CONSTRAINT batch_waiting_reason_check CHECK (waiting_reason IN ('credential', 'disk', 'key', 'store'));
