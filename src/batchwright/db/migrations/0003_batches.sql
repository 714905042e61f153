-- Files and batches: what users upload, the batches they make of it, and what has been answered so far.
-- serves: 0.1.0

-- A file that somebody uploaded or a batch wrote. Its bytes are the object `key` of the store. One that is deleted or
-- expired is gone for its user; row and bytes stay as long as an open batch reads them.
CREATE TABLE batchwright.file (
    id              text COLLATE "C" PRIMARY KEY CHECK (id ~ '^file-[0-9a-f]{32}$'),
    tenant          text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    purpose         text NOT NULL CHECK (length(purpose) BETWEEN 1 AND 64),
    filename        text NOT NULL CHECK (length(filename) BETWEEN 1 AND 512),
    bytes           bigint NOT NULL CHECK (bytes >= 0),
    sha256          text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    key             text NOT NULL UNIQUE,
    idempotency_key text CHECK (length(idempotency_key) BETWEEN 1 AND 300),
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz,
    deleted_at      timestamptz
);
CREATE INDEX file_listed ON batchwright.file (tenant, id) WHERE deleted_at IS NULL;
CREATE INDEX file_expiring ON batchwright.file (expires_at) WHERE expires_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX file_deleted ON batchwright.file (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE UNIQUE INDEX file_idempotency ON batchwright.file (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TYPE batchwright.batch_status AS ENUM (
    'validating', 'in_progress', 'finalizing', 'completed', 'failed', 'expired', 'cancelling', 'cancelled');

CREATE TABLE batchwright.batch (
    id                   text COLLATE "C" PRIMARY KEY CHECK (id ~ '^batch_[0-9a-f]{32}$'),
    tenant               text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    status               batchwright.batch_status NOT NULL DEFAULT 'validating',
    job_id               uuid NOT NULL UNIQUE,
    queue                text NOT NULL CHECK (length(queue) BETWEEN 1 AND 200),
    priority             smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
    endpoint             text NOT NULL,
    input_file_id        text COLLATE "C" NOT NULL,
    completion_window    text NOT NULL,
    output_expires_seconds integer,
    metadata             jsonb,
    limits               jsonb NOT NULL DEFAULT '{}',
    idempotency_key      text CHECK (length(idempotency_key) BETWEEN 1 AND 300),
    idempotency_digest   bytea,
    traceparent          text,
    retry_of             text COLLATE "C",
    retry_codes          text[],
    family               text COLLATE "C" NOT NULL,

    -- What the plan found.
    models               text[],
    total                bigint NOT NULL DEFAULT 0 CHECK (total >= 0),
    input_sha256         text,
    errors               jsonb,

    -- What is registered in segments so far; at the end, what the files hold.
    completed            bigint NOT NULL DEFAULT 0,
    failed               bigint NOT NULL DEFAULT 0,
    expired              bigint NOT NULL DEFAULT 0,
    cancelled            bigint NOT NULL DEFAULT 0,
    input_tokens         bigint NOT NULL DEFAULT 0,
    cached_tokens        bigint NOT NULL DEFAULT 0,
    output_tokens        bigint NOT NULL DEFAULT 0,
    reasoning_tokens     bigint NOT NULL DEFAULT 0,
    usage_by_model       jsonb NOT NULL DEFAULT '{}',
    error_summary        jsonb NOT NULL DEFAULT '{}',
    full_disks           integer NOT NULL DEFAULT 0,
    full_disk_at         timestamptz,

    -- The order to stop, and why.
    stop_reason          text CHECK (stop_reason IN ('deadline', 'cancel', 'error')),
    stop_at              timestamptz,
    stop_error           jsonb,

    output_file_id       text COLLATE "C",
    error_file_id        text COLLATE "C",
    manifest             jsonb,
    -- From when on answers cannot be read one by one, and when the last of what the batch left behind was removed.
    segments_gone_at     timestamptz,
    leftovers_gone_at    timestamptz,

    created_at           timestamptz NOT NULL,
    expires_at           timestamptz NOT NULL,
    paused_at            timestamptz,
    taken_up_at          timestamptz,
    in_progress_at       timestamptz,
    finalizing_at        timestamptz,
    completed_at         timestamptz,
    failed_at            timestamptz,
    expired_at           timestamptz,
    cancelling_at        timestamptz,
    cancelled_at         timestamptz,

    CONSTRAINT stop_has_a_time CHECK ((stop_reason IS NULL) = (stop_at IS NULL)),
    CONSTRAINT unreadable_before_removed CHECK (leftovers_gone_at IS NULL OR segments_gone_at IS NOT NULL),
    CONSTRAINT completed_means_accounted
        CHECK (status <> 'completed' OR completed + failed + expired + cancelled = total),
    CONSTRAINT endings_have_their_time CHECK (
            (status = 'completed') = (completed_at IS NOT NULL)
        AND (status = 'failed') = (failed_at IS NOT NULL)
        AND (status = 'expired') = (expired_at IS NOT NULL)
        AND (status = 'cancelled') = (cancelled_at IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX batch_listed ON batchwright.batch (tenant, id);
CREATE INDEX batch_open ON batchwright.batch (expires_at) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE INDEX batch_input ON batchwright.batch (input_file_id);
CREATE INDEX batch_family ON batchwright.batch (family) WHERE retry_of IS NOT NULL;
CREATE UNIQUE INDEX batch_idempotency ON batchwright.batch (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The collector's questions: whose journals and plans may go, and which batch is old enough to go itself?
CREATE INDEX batch_leftovers ON batchwright.batch (coalesce(completed_at, failed_at, expired_at, cancelled_at), id)
    WHERE leftovers_gone_at IS NULL;
CREATE INDEX batch_ended ON batchwright.batch (coalesce(completed_at, failed_at, expired_at, cancelled_at), id)
    WHERE leftovers_gone_at IS NOT NULL;

CREATE FUNCTION batchwright.reject_batch_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of batch %: % to %', NEW.id,
        CASE TG_OP WHEN 'INSERT' THEN 'nothing' ELSE OLD.status::text END, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_batch_moves';
END
$$;

CREATE TRIGGER legal_batch_moves BEFORE UPDATE OF status ON batchwright.batch FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       (OLD.status = 'validating' AND NEW.status IN ('in_progress', 'failed', 'expired', 'cancelling'))
    OR (OLD.status = 'in_progress' AND NEW.status IN ('finalizing', 'failed', 'expired', 'cancelling'))
    OR (OLD.status = 'finalizing' AND NEW.status IN ('completed', 'failed', 'cancelling'))
    OR (OLD.status = 'cancelling' AND NEW.status IN ('cancelled', 'failed'))
))
EXECUTE FUNCTION batchwright.reject_batch_move();

CREATE TRIGGER legal_batch_births BEFORE INSERT ON batchwright.batch FOR EACH ROW
WHEN (NEW.status <> 'validating')
EXECUTE FUNCTION batchwright.reject_batch_move();

-- What is answered: a range of a journal, in the order in which it was registered within its batch. A byte of a
-- journal that no row covers does not exist.
CREATE TABLE batchwright.batch_segment (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch_id      text COLLATE "C" NOT NULL REFERENCES batchwright.batch ON DELETE CASCADE,
    shard         integer NOT NULL,
    claim         bigint NOT NULL,
    seq           integer NOT NULL,
    -- Where: a file of the host's work folder, or an object of the store.
    host          text NOT NULL,
    key           text,
    start_byte    bigint NOT NULL CHECK (start_byte >= 0),
    end_byte      bigint NOT NULL,
    lines         integer NOT NULL,
    tally         jsonb NOT NULL,
    registered_at timestamptz NOT NULL,
    CHECK (end_byte > start_byte),
    UNIQUE (batch_id, shard, claim, seq)
);
CREATE INDEX batch_segment_of_batch ON batchwright.batch_segment (batch_id, id);

-- What a worker says of itself at this moment, in the flat form of its counts: it counts no longer than the worker lives.
ALTER TABLE batchwright.worker ADD COLUMN gauges jsonb;

-- Operations that it takes on demand, apart from its slots, and the queues from which; one that ends in a slash stands
-- for all below it.
ALTER TABLE batchwright.worker ADD COLUMN on_demand_types text[];
ALTER TABLE batchwright.worker ADD COLUMN on_demand_queues text[];

-- What must not be in this worker, and is: it takes no more jobs, and whoever runs it should start it anew.
ALTER TABLE batchwright.worker ADD COLUMN broken text;

-- How much of a gateway's rate is left now; workers take from it a second's worth at a time.
CREATE TABLE batchwright.budget (
    name        text PRIMARY KEY,
    requests    float8 NOT NULL,
    tokens      float8 NOT NULL,
    refilled_at timestamptz NOT NULL
) WITH (fillfactor = 50);
