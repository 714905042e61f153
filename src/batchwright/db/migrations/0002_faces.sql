-- Lists, the inbox and retention over jobs; API keys and requests; schedules; what workers have counted.
-- serves: 0.1.0

-- A failed job that a human has seen and does not want to see again.
ALTER TABLE batchwright.job ADD COLUMN dismissed_at timestamptz;

-- The list's question: which jobs of this tenant came before that one?
CREATE INDEX job_listed ON batchwright.job (tenant, created_at, id);

-- Retention's question: what ended like this, and before then? With the id, because thousands may end in one moment.
CREATE INDEX job_ended ON batchwright.job (status, finished_at, id) WHERE finished_at IS NOT NULL;

-- Drops a partition of events, and moves the events of jobs that still exist to the default partition: 'dropped'.
-- It stays when more than `jobs_max` jobs created before `created_before` still exist, or when they have more than
-- `events_max` events in it: 'needed'. It also stays when a lock could not be had at once: 'busy'.
--
-- Dropping locks all events, and so nearly every verb, out. While a lock is waited for, others queue up behind it: for
-- 100 ms at most for the table, and again for the partition and for the default one. All three are held for the move
-- of at most `events_max` rows (10,000 take about 0.1 s) until the caller commits; should it fall silent before that,
-- the server ends its transaction after a second.
CREATE FUNCTION batchwright.drop_event_partition(
    partition text, created_before timestamptz, jobs_max integer, events_max integer) RETURNS text
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    is_locked boolean;
    survivors uuid[];
    events integer;
    answer text := 'busy';
BEGIN
    -- Twice, because most of those that must stay can be told without the lock, and only with it is the answer final.
    FOREACH is_locked IN ARRAY ARRAY[false, true] LOOP
        IF is_locked THEN
            LOCK TABLE ONLY batchwright.job_event IN ACCESS EXCLUSIVE MODE;
        END IF;
        survivors := ARRAY(
            WITH RECURSIVE known AS (
                (SELECT tenant FROM batchwright.job ORDER BY tenant LIMIT 1)
                UNION ALL
                SELECT (SELECT job.tenant FROM batchwright.job WHERE job.tenant > known.tenant ORDER BY job.tenant LIMIT 1)
                FROM known WHERE known.tenant IS NOT NULL
            )
            SELECT old.id
            FROM known CROSS JOIN LATERAL (
                SELECT job.id FROM batchwright.job
                WHERE job.tenant = known.tenant AND job.created_at < created_before
                ORDER BY job.created_at, job.id
                LIMIT jobs_max + 1
            ) AS old
            LIMIT jobs_max + 1);
        EXECUTE format('SELECT count(*) FROM (SELECT FROM batchwright.%I WHERE job_id = ANY($1) LIMIT $2) AS few', partition)
            INTO events USING survivors, events_max + 1;
        IF cardinality(survivors) > jobs_max OR events > events_max THEN
            -- An error, because only that gives locks back before the caller's transaction ends.
            answer := 'needed';
            RAISE lock_not_available;
        END IF;
    END LOOP;
    PERFORM set_config('idle_in_transaction_session_timeout', '1000', true);
    EXECUTE format('ALTER TABLE batchwright.job_event DETACH PARTITION batchwright.%I', partition);
    EXECUTE format('INSERT INTO batchwright.job_event SELECT * FROM batchwright.%I WHERE job_id = ANY($1)', partition)
        USING survivors;
    EXECUTE format('DROP TABLE batchwright.%I', partition);
    RETURN 'dropped';
EXCEPTION WHEN lock_not_available OR deadlock_detected OR undefined_table THEN
    RETURN answer;
END
$$;

-- The inbox's question: what failed, by type and cause?
CREATE INDEX job_inbox ON batchwright.job (tenant, job_type, (error ->> 'code'))
    WHERE status = 'FAILED' AND dismissed_at IS NULL;

-- Parents that wait for their children. Its columns stand in other indexes already, so no update is less HOT for it.
CREATE INDEX job_waiting ON batchwright.job (queue) WHERE status = 'RUNNING' AND locked_by IS NULL;

-- Keys are random, so a plain hash keeps them as safe as a slow one would.
CREATE TABLE batchwright.api_key (
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
CREATE TABLE batchwright.api_request (
    tenant     text NOT NULL,
    key        text NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
    digest     bytea NOT NULL,
    answer     jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX api_request_age ON batchwright.api_request (created_at);

-- `next_at` only grows: a clock that steps back fires nothing twice.
CREATE TABLE batchwright.schedule (
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
CREATE INDEX schedule_due ON batchwright.schedule (next_at) WHERE paused_at IS NULL AND next_at IS NOT NULL;

-- What each worker process has counted since it started; the row '' holds the sum of those that are gone. A folded row
-- is in that sum already; it stays for a while, so that a worker that was only frozen can see what was taken over.
CREATE TABLE batchwright.worker_counts (
    worker     text PRIMARY KEY,
    counts     jsonb NOT NULL,
    updated_at timestamptz NOT NULL,
    folded_at  timestamptz
) WITH (fillfactor = 50);
