-- What was spent on models, summed by tenant and day, so that nobody need add up the events.
-- serves: 0.1.0

-- A call whose cost nobody knows is counted in `unpriced` as well as in `calls`.
CREATE TABLE batchwright.spending (
    tenant            text NOT NULL,
    day               date NOT NULL,
    model             text NOT NULL,
    lane              text NOT NULL,
    calls             bigint NOT NULL DEFAULT 0,
    unpriced          bigint NOT NULL DEFAULT 0,
    prompt_tokens     bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    cost              numeric NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, day, model, lane)
) WITH (fillfactor = 70);

-- What was spent by all, or long ago?
CREATE INDEX spending_day ON batchwright.spending (day);
