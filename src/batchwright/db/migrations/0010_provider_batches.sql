-- Batches whose requests an outside provider answers.
-- serves: 0.1.0

ALTER TABLE batchwright.batch
    -- They may wait for a credential that the provider refuses.
    DROP CONSTRAINT batch_waiting_reason_check,
    ADD CONSTRAINT batch_waiting_reason_check CHECK (waiting_reason IN ('credential', 'disk', 'key', 'store')),
    -- What the shards may cost altogether that go there because the batch would be late.
    ADD COLUMN overflow_cost double precision NOT NULL DEFAULT 0;
