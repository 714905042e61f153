-- The job table, its events, and the workers, queues and operations around it.
-- serves: 0.1.0

CREATE TYPE batchwright.job_status AS ENUM ('QUEUED', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED');

CREATE TABLE batchwright.job (
    id               uuid PRIMARY KEY,
    job_type         text NOT NULL CHECK (length(job_type) BETWEEN 1 AND 100),
    queue            text NOT NULL CHECK (length(queue) BETWEEN 1 AND 200),
    tenant           text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    owner            text,
    status           batchwright.job_status NOT NULL DEFAULT 'QUEUED',
    priority         smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
    run_after        timestamptz NOT NULL,
    deadline         timestamptz,
    deadline_passed  boolean NOT NULL DEFAULT false,
    payload          jsonb NOT NULL,
    result           jsonb,
    error            jsonb,
    attempts         integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    max_attempts     integer NOT NULL CHECK (max_attempts >= 1),
    rescues          integer NOT NULL DEFAULT 0 CHECK (rescues >= 0),
    claims           bigint NOT NULL DEFAULT 0,
    locked_by        text,
    locked_at        timestamptz,
    lease_until      timestamptz,
    exclusive_key    text,
    is_current       boolean NOT NULL DEFAULT false,
    pipeline_id      uuid NOT NULL,
    parent_job_id    uuid,
    round            smallint,
    waits            smallint NOT NULL DEFAULT 0,
    on_join          text CHECK (on_join IN ('close', 'resume')),
    allow_failures   integer,
    children_open    integer NOT NULL DEFAULT 0 CHECK (children_open >= 0),
    children_failed  integer NOT NULL DEFAULT 0 CHECK (children_failed >= 0),
    progress_current bigint,
    progress_total   bigint,
    message          text,
    idempotency_key  text CHECK (length(idempotency_key) BETWEEN 1 AND 255),
    traceparent      text,
    created_at       timestamptz NOT NULL,
    started_at       timestamptz,
    finished_at      timestamptz,

    CONSTRAINT finished_means_terminal
        CHECK ((finished_at IS NOT NULL) = (status IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))),
    CONSTRAINT lock_and_lease_go_together
        CHECK ((locked_by IS NULL) = (lease_until IS NULL)),
    -- A cancelled or expired job keeps its lease until its worker has let go of it.
    CONSTRAINT lease_only_while_held
        CHECK (lease_until IS NULL OR status IN ('RUNNING', 'CANCELLED', 'FAILED')),
    CONSTRAINT running_is_held_or_waits
        CHECK (status <> 'RUNNING' OR lease_until IS NOT NULL OR children_open > 0),
    CONSTRAINT open_children_only_while_running
        CHECK (children_open = 0 OR status = 'RUNNING'),
    CONSTRAINT current_has_a_key
        CHECK (NOT is_current OR exclusive_key IS NOT NULL),
    CONSTRAINT running_with_a_key_is_current
        CHECK (status <> 'RUNNING' OR exclusive_key IS NULL OR is_current)
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- The claim's question: what is due in this lane?
CREATE INDEX job_due ON batchwright.job (queue, priority, run_after, id) WHERE status = 'QUEUED';

-- The lease's question: what does this worker hold? lease_until stays out of every index: renewals are HOT.
CREATE INDEX job_held ON batchwright.job (locked_by) WHERE locked_by IS NOT NULL;

-- The whole guarantee that one key has one current job.
CREATE UNIQUE INDEX job_current ON batchwright.job (tenant, exclusive_key) WHERE is_current;

-- Jobs that wait for a key, in the order in which they get it.
CREATE INDEX job_key ON batchwright.job (tenant, exclusive_key, priority, run_after, id)
    WHERE exclusive_key IS NOT NULL AND finished_at IS NULL;

CREATE UNIQUE INDEX job_idempotency ON batchwright.job (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX job_children ON batchwright.job (parent_job_id, round) WHERE parent_job_id IS NOT NULL;

-- Chained jobs of a pipeline: its root is the row of that id, children hang under their parents.
CREATE INDEX job_pipeline ON batchwright.job (pipeline_id) WHERE parent_job_id IS NULL AND pipeline_id <> id;

CREATE INDEX job_deadline ON batchwright.job (deadline)
    WHERE deadline IS NOT NULL AND finished_at IS NULL AND NOT deadline_passed;

-- Jobs whose worker died twice: they run alone, in a process of their own.
CREATE INDEX job_suspect ON batchwright.job (run_after) WHERE status = 'QUEUED' AND rescues >= 2;

CREATE FUNCTION batchwright.reject_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of job %: % to %', NEW.id,
        CASE TG_OP WHEN 'INSERT' THEN 'nothing' ELSE OLD.status::text END, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_moves';
END
$$;

-- The matrix stands in WHEN, so that a legal move never calls the function.
CREATE TRIGGER legal_moves BEFORE UPDATE OF status ON batchwright.job FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       OLD.status = 'RUNNING'
    OR (OLD.status = 'QUEUED' AND NEW.status <> 'SUCCEEDED')
    OR (OLD.status IN ('FAILED', 'CANCELLED') AND NEW.status IN ('QUEUED', 'RUNNING'))
))
EXECUTE FUNCTION batchwright.reject_move();

CREATE TRIGGER legal_births BEFORE INSERT ON batchwright.job FOR EACH ROW
WHEN (NEW.status <> 'QUEUED')
EXECUTE FUNCTION batchwright.reject_move();

CREATE SEQUENCE batchwright.job_event_id;

-- What happened to each job. Rows that record a move carry the status, claim and attempt that it led to.
CREATE TABLE batchwright.job_event (
    id                bigint NOT NULL DEFAULT nextval('batchwright.job_event_id'),
    job_id            uuid NOT NULL,
    ts                timestamptz NOT NULL,
    event             text NOT NULL CHECK (length(event) BETWEEN 1 AND 200),
    level             text NOT NULL DEFAULT 'info' CHECK (level IN ('info', 'warning', 'error')),
    status            batchwright.job_status,
    claim             bigint,
    attempt           integer,
    worker            text,
    message           text,
    fields            jsonb,
    model             text,
    prompt_tokens     bigint,
    completion_tokens bigint,
    cost              numeric,
    error_kind        text
) PARTITION BY RANGE (ts);

ALTER SEQUENCE batchwright.job_event_id OWNED BY batchwright.job_event.id;
CREATE INDEX job_event_of_job ON batchwright.job_event (job_id, id);
CREATE TABLE batchwright.job_event_default PARTITION OF batchwright.job_event DEFAULT;

-- Makes the weekly partitions from this week to the one that holds `at` + 7 days; answers how many are new.
-- A week that already has rows in the default partition stays there.
CREATE FUNCTION batchwright.make_event_partitions(at timestamptz) RETURNS integer
LANGUAGE plpgsql SET TimeZone = 'UTC' AS $$
DECLARE
    week timestamptz := date_trunc('week', at, 'UTC');
    name text;
    made integer := 0;
BEGIN
    WHILE week <= at + interval '7 days' LOOP
        name := 'job_event_' || to_char(week AT TIME ZONE 'UTC', 'IYYY_"w"IW');
        IF to_regclass('batchwright.' || name) IS NULL AND NOT EXISTS (
            SELECT FROM batchwright.job_event_default
            WHERE ts >= week AND ts < week + interval '7 days'
        ) THEN
            EXECUTE format('CREATE TABLE batchwright.%I (LIKE batchwright.job_event INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', name);
            EXECUTE format('ALTER TABLE batchwright.job_event ATTACH PARTITION batchwright.%I FOR VALUES FROM (%L) TO (%L)',
                           name, week, week + interval '7 days');
            made := made + 1;
        END IF;
        week := week + interval '7 days';
    END LOOP;
    RETURN made;
END
$$;

SELECT batchwright.make_event_partitions(now());

CREATE TABLE batchwright.queue (
    name       text PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 200),
    paused_at  timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE batchwright.operation (
    name           text PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 100),
    payload_schema jsonb NOT NULL,
    defaults       jsonb NOT NULL,
    description    text,
    published_at   timestamptz NOT NULL,
    published_by   text NOT NULL
);

CREATE TABLE batchwright.worker (
    id           text PRIMARY KEY,
    host         text NOT NULL,
    pid          integer NOT NULL,
    version      text NOT NULL,
    queues       text[],
    operations   text[] NOT NULL,
    concurrency  integer NOT NULL,
    running      integer NOT NULL DEFAULT 0,
    started_at   timestamptz NOT NULL,
    heartbeat_at timestamptz NOT NULL,
    stopping_at  timestamptz
) WITH (fillfactor = 50);
