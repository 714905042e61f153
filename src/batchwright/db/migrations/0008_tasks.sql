-- Tasks: work that outside providers do, for hours, and for money.
-- serves: 0.1.0

CREATE TYPE batchwright.task_status AS ENUM (
    'PENDING', 'IN_PROGRESS', 'COMPLETED', 'PARTIAL_COMPLETE', 'FAILED', 'CANCELLED');

-- `provider_state` is the document of its type and provider; everything else that is known has a column of its own.
CREATE TABLE batchwright.task (
    id                  text COLLATE "C" PRIMARY KEY CHECK (id ~ '^task_[0-9a-f]{32}$'),
    tenant              text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    status              batchwright.task_status NOT NULL DEFAULT 'PENDING',
    task_type           text NOT NULL CHECK (length(task_type) BETWEEN 1 AND 64),
    provider            text,
    -- One remote job, or several, for each: {"provider", "model"}.
    targets             jsonb NOT NULL,
    inputs              jsonb NOT NULL,
    invalid_urls        text[] NOT NULL DEFAULT '{}',
    options             jsonb NOT NULL DEFAULT '{}',
    metadata            jsonb,
    job_id              uuid NOT NULL,
    queue               text NOT NULL,
    priority            smallint NOT NULL,
    traceparent         text,
    idempotency_key     text,
    idempotency_digest  bytea,
    provider_state      jsonb,
    error               jsonb,
    succeeded           integer NOT NULL DEFAULT 0,
    failed              integer NOT NULL DEFAULT 0,
    input_tokens        bigint,
    output_tokens       bigint,
    audio_seconds       double precision,
    cost                double precision,
    result_file_id      text COLLATE "C",
    result_expires_seconds integer,
    cancel_note         text,
    waiting_message     text,
    waiting_at          timestamptz,
    created_at          timestamptz NOT NULL,
    in_progress_at      timestamptz,
    cancel_requested_at timestamptz,
    deadline_at         timestamptz NOT NULL,
    ended_at            timestamptz,
    CONSTRAINT ended_means_a_last_status
        CHECK ((ended_at IS NOT NULL) = (status NOT IN ('PENDING', 'IN_PROGRESS'))),
    CONSTRAINT progress_means_a_state
        CHECK (status IN ('PENDING', 'FAILED', 'CANCELLED') OR provider_state IS NOT NULL)
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX task_idempotency ON batchwright.task (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX task_of_tenant ON batchwright.task (tenant, id);
CREATE INDEX task_open ON batchwright.task (deadline_at, id) WHERE ended_at IS NULL;
CREATE INDEX task_ended ON batchwright.task (ended_at, id) WHERE ended_at IS NOT NULL;

CREATE FUNCTION batchwright.reject_task_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of task %: % to %', NEW.id,
        CASE TG_OP WHEN 'INSERT' THEN 'nothing' ELSE OLD.status::text END, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_task_moves';
END
$$;

CREATE TRIGGER legal_task_moves BEFORE UPDATE OF status ON batchwright.task FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       (OLD.status = 'PENDING' AND NEW.status IN ('IN_PROGRESS', 'FAILED', 'CANCELLED'))
    OR (OLD.status = 'IN_PROGRESS' AND NEW.status IN ('COMPLETED', 'PARTIAL_COMPLETE', 'FAILED', 'CANCELLED'))
))
EXECUTE FUNCTION batchwright.reject_task_move();

CREATE TRIGGER legal_task_births BEFORE INSERT ON batchwright.task FOR EACH ROW
WHEN (NEW.status <> 'PENDING')
EXECUTE FUNCTION batchwright.reject_task_move();

-- A job at a provider, from the intent on. It is paid for once: nothing is sent before the row says `submitting`, and
-- a row that says so is looked for at the provider before anything is sent again.
CREATE TABLE batchwright.provider_job (
    key                text COLLATE "C" PRIMARY KEY CHECK (key ~ '^bw-[0-9a-z]{26}$'),
    owner              text COLLATE "C" NOT NULL,
    number             integer NOT NULL CHECK (number >= 0),
    provider           text NOT NULL,
    model              text,
    input_ids          text[] NOT NULL,
    phase              text NOT NULL DEFAULT 'planned'
        CHECK (phase IN ('planned', 'staged', 'submitting', 'submitted', 'ended')),
    staged             jsonb NOT NULL DEFAULT '{}',
    external_id        text,
    extra              jsonb NOT NULL DEFAULT '{}',
    -- Jobs at the provider that turned out to be another's.
    strangers          text[] NOT NULL DEFAULT '{}',
    -- As it stands in the provider_state of its task.
    document           jsonb,
    raw_status         text,
    total              integer,
    succeeded          integer,
    failed             integer,
    failures           integer NOT NULL DEFAULT 0,
    cancelled          text CHECK (cancelled IN ('requested', 'unsupported', 'ended_already')),
    error              jsonb,
    results_key        text,
    input_tokens       bigint,
    output_tokens      bigint,
    audio_seconds      double precision,
    cost               double precision,
    created_at         timestamptz NOT NULL,
    next_at            timestamptz NOT NULL,
    submitting_at      timestamptz,
    -- When nobody could be sending it any more: from then on it must be in the provider's lists before long.
    doubtful_at        timestamptz,
    submitted_at       timestamptz,
    -- When it was first to be stopped, because its task was cancelled or late.
    stopping_at        timestamptz,
    ended_at           timestamptz,
    cleaned_at         timestamptz,
    UNIQUE (owner, number),
    CONSTRAINT submitted_means_a_reference CHECK (phase <> 'submitted' OR external_id IS NOT NULL),
    CONSTRAINT ended_means_a_time CHECK ((phase = 'ended') = (ended_at IS NOT NULL))
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX provider_job_reference ON batchwright.provider_job (provider, external_id)
    WHERE external_id IS NOT NULL;
CREATE INDEX provider_job_in_doubt ON batchwright.provider_job (provider) WHERE phase = 'submitting';
CREATE INDEX provider_job_unclean ON batchwright.provider_job (ended_at, key)
    WHERE phase = 'ended' AND cleaned_at IS NULL;

-- A provider whose credential was refused: all work for it waits, and one process at a time tries again.
CREATE TABLE batchwright.provider_hold (
    provider    text PRIMARY KEY,
    code        text,
    message     text NOT NULL,
    since       timestamptz NOT NULL,
    tries       integer NOT NULL DEFAULT 0,
    next_try_at timestamptz NOT NULL,
    -- It works again; kept, so that one that is refused again at once is tried less and less often.
    released_at timestamptz
);

-- Files that an object of a part still reads: their bytes stay, also when their user has deleted them.
CREATE TABLE batchwright.file_use (
    file_id text COLLATE "C" NOT NULL,
    owner   text COLLATE "C" NOT NULL,
    PRIMARY KEY (file_id, owner)
);
CREATE INDEX file_use_of_owner ON batchwright.file_use (owner);
