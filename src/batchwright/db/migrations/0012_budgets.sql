-- A rate budget hears what servers say, and counts calls in flight over all workers.
-- serves: 0.1.0

-- Levels below zero are debts. The share is the part of the rate that refills them: a server that refuses cuts it, and
-- it grows back until it is whole. `*_limit` is what the server said of its own limit, by the second.
ALTER TABLE batchwright.budget
    ADD COLUMN share          float8 NOT NULL DEFAULT 1,
    ADD COLUMN cut_at         timestamptz,
    ADD COLUMN blocked_until  timestamptz,
    ADD COLUMN requests_limit float8,
    ADD COLUMN tokens_limit   float8,
    ADD COLUMN in_use         integer NOT NULL DEFAULT 0,
    ADD COLUMN held_seconds   float8 NOT NULL DEFAULT 0,
    ADD COLUMN line_ends_at   timestamptz;

-- Calls in flight, each with an end, so that those of a worker that died come back by themselves. Their number stands in
-- the budget as `in_use`, and changes in the same statement.
CREATE TABLE batchwright.budget_slot (
    id       uuid PRIMARY KEY,
    name     text NOT NULL,
    holder   text NOT NULL,
    taken_at timestamptz NOT NULL,
    ends_at  timestamptz NOT NULL
) WITH (fillfactor = 70);

-- Which slots of this budget are over?
CREATE INDEX budget_slot_ends ON batchwright.budget_slot (name, ends_at);
