-- What the dashboard draws: figures of every minute, and the course of each larger batch.
-- serves: 0.1.0

-- One row per minute, written by upkeep. `totals` are counters over all processes that ever counted: they never go
-- down, and the difference of two rows is what happened between them. `levels` say how things stood at that moment.
CREATE TABLE batchwright.sample (
    at     timestamptz PRIMARY KEY,
    totals jsonb NOT NULL,
    levels jsonb NOT NULL
);

-- What workers registered for a batch and model within some seconds, and, by worker, the limit of requests in flight
-- and how many were. Written by the statement that adds up the batch.
CREATE TABLE batchwright.batch_sample (
    batch_id      text COLLATE "C" NOT NULL REFERENCES batchwright.batch ON DELETE CASCADE,
    model         text NOT NULL,
    at            timestamptz NOT NULL,
    seconds       integer NOT NULL CHECK (seconds > 0),
    completed     bigint NOT NULL,
    failed        bigint NOT NULL,
    input_tokens  bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    load          jsonb NOT NULL,
    PRIMARY KEY (batch_id, at, model)
) WITH (fillfactor = 50);

-- Which samples are old?
CREATE INDEX batch_sample_age ON batchwright.batch_sample (at);

-- By model: how many requests a batch has, as its plan says, and how many are registered as answered and as failed.
ALTER TABLE batchwright.batch ADD COLUMN progress_by_model jsonb NOT NULL DEFAULT '{}';
