-- Deaths are told from other returns of a job, and workers that left from workers that died.
-- serves: 0.1.0

-- The last claim whose worker died. The claim after it knows that it takes over from a dead worker.
ALTER TABLE batchwright.job ADD COLUMN dead_claim bigint;

-- When a worker left of its own accord. The row stays for some minutes: what it served counts as served meanwhile.
ALTER TABLE batchwright.worker ADD COLUMN left_at timestamptz;
