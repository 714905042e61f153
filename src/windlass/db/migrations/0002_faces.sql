-- Lists, the inbox and retention over jobs; API keys and requests; schedules; what workers have counted.
-- serves: 0.1.0

-- A failed job that a human has seen and does not want to see again.
ALTER TABLE windlass.job ADD COLUMN dismissed_at timestamptz;

-- The list's question: which jobs of this tenant came before that one?
CREATE INDEX job_listed ON windlass.job (tenant, created_at, id);

-- Retention's question: what ended like this, and before then?
CREATE INDEX job_ended ON windlass.job (status, finished_at) WHERE finished_at IS NOT NULL;

-- The inbox's question: what failed, by type and cause?
CREATE INDEX job_inbox ON windlass.job (tenant, job_type, (error ->> 'code'))
    WHERE status = 'FAILED' AND dismissed_at IS NULL;

-- Keys are random, so a plain hash keeps them as safe as a slow one would.
CREATE TABLE windlass.api_key (
    id           uuid PRIMARY KEY,
    digest       bytea NOT NULL UNIQUE,
    hint         text NOT NULL,
    name         text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    tenant       text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    scopes       text[] NOT NULL CHECK (scopes <@ ARRAY['read', 'submit', 'operate', 'admin'] AND cardinality(scopes) > 0),
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz,
    last_used_at timestamptz,
    revoked_at   timestamptz
);

-- What an Idempotency-Key stands for: the request that came with it first, and its answer.
CREATE TABLE windlass.api_request (
    tenant     text NOT NULL,
    key        text NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
    digest     bytea NOT NULL,
    answer     jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX api_request_age ON windlass.api_request (created_at);

-- `next_at` only grows: a clock that steps back fires nothing twice.
CREATE TABLE windlass.schedule (
    id           uuid PRIMARY KEY,
    tenant       text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    name         text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    cron         text NOT NULL,
    timezone     text NOT NULL,
    missed       text NOT NULL CHECK (missed IN ('skip', 'latest', 'all')),
    job          jsonb NOT NULL,
    tick_field   text,
    next_at      timestamptz,
    last_tick_at timestamptz,
    last_job_id  uuid,
    last_error   text,
    fires        bigint NOT NULL DEFAULT 0,
    paused_at    timestamptz,
    created_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL,
    UNIQUE (tenant, name)
);
CREATE INDEX schedule_due ON windlass.schedule (next_at) WHERE paused_at IS NULL AND next_at IS NOT NULL;

-- What each worker process has counted since it started; the row '' holds the sum of those that are gone.
CREATE TABLE windlass.worker_counts (
    worker     text PRIMARY KEY,
    counts     jsonb NOT NULL,
    updated_at timestamptz NOT NULL
) WITH (fillfactor = 50);
