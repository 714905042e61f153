-- Rounds of upkeep run once per period over all workers, and not once in each of them.
-- serves: 0.1.0

-- `keeper` is the worker that ran the round last. A round that runs has its row locked.
CREATE TABLE batchwright.upkeep (
    name   text PRIMARY KEY,
    due_at timestamptz NOT NULL,
    ran_at timestamptz,
    keeper text NOT NULL
) WITH (fillfactor = 50);
