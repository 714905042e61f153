-- Documents: collections of what was read, and the runs that read it, step by step.
-- serves: 0.1.0

CREATE TYPE batchwright.run_status AS ENUM (
    'PENDING', 'RUNNING', 'PARKED', 'COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED', 'CANCELLED');
CREATE TYPE batchwright.item_status AS ENUM ('OPEN', 'DONE', 'UNCHANGED', 'FAILED', 'CANCELLED');

CREATE TABLE batchwright.ingest_collection (
    id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant     text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    name       text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    -- A text search configuration: how the words of texts and of questions are made.
    language   text NOT NULL DEFAULT 'english',
    created_at timestamptz NOT NULL,
    -- Being deleted: upkeep removes what it holds, piece by piece, and then the row.
    deleted_at timestamptz
);
CREATE UNIQUE INDEX ingest_collection_name ON batchwright.ingest_collection (tenant, name) WHERE deleted_at IS NULL;

-- A source, whatever its versions. `live_version` is what search finds; `etag` is of the version that is live.
CREATE TABLE batchwright.ingest_document (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    collection_id integer NOT NULL REFERENCES batchwright.ingest_collection,
    source        text NOT NULL CHECK (length(source) BETWEEN 1 AND 4000),
    name          text NOT NULL,
    etag          text,
    live_version  bigint,
    created_at    timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL
);
CREATE UNIQUE INDEX ingest_document_source ON batchwright.ingest_document (collection_id, md5(source));
CREATE INDEX ingest_document_of_collection ON batchwright.ingest_document (collection_id, id);

-- What was made of a document once. `steps` holds the key and the output of each step, so that a later run takes over
-- those whose key is the same; `recipe` is the digest of all fingerprints that it was made by.
CREATE TABLE batchwright.ingest_version (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    document_id   bigint NOT NULL REFERENCES batchwright.ingest_document ON DELETE CASCADE,
    collection_id integer NOT NULL,
    item_id       text COLLATE "C" NOT NULL,
    generation    integer NOT NULL,
    state         text NOT NULL DEFAULT 'staged' CHECK (state IN ('staged', 'live', 'retired')),
    recipe        text NOT NULL,
    sha256        text NOT NULL,
    steps         jsonb NOT NULL DEFAULT '{}',
    metadata      jsonb NOT NULL DEFAULT '{}',
    -- Known when it goes live.
    chunk_count   integer,
    text_bytes    bigint,
    created_at    timestamptz NOT NULL,
    retired_at    timestamptz,
    UNIQUE (item_id, generation)
);
CREATE INDEX ingest_version_of_document ON batchwright.ingest_version (document_id);
CREATE INDEX ingest_version_retired ON batchwright.ingest_version (retired_at) WHERE state = 'retired';
CREATE UNIQUE INDEX ingest_version_live ON batchwright.ingest_version (document_id) WHERE state = 'live';
CREATE INDEX ingest_version_live_sizes ON batchwright.ingest_version (collection_id)
    INCLUDE (chunk_count, text_bytes, created_at) WHERE state = 'live';
CREATE INDEX ingest_version_live_metadata ON batchwright.ingest_version USING gin (metadata jsonb_path_ops)
    WHERE state = 'live';

-- `words` is null until the version is live. It also holds a lexeme of the collection, so that one index serves all.
CREATE TABLE batchwright.ingest_chunk (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    version_id    bigint NOT NULL REFERENCES batchwright.ingest_version ON DELETE CASCADE,
    collection_id integer NOT NULL,
    number        integer NOT NULL,
    key           text COLLATE "C" NOT NULL,
    hash          bytea NOT NULL,
    char_start    integer NOT NULL,
    char_end      integer NOT NULL,
    overlap       integer NOT NULL DEFAULT 0,
    page_first    integer,
    page_last     integer,
    section       text[] NOT NULL DEFAULT '{}',
    tokens        integer NOT NULL,
    text          text NOT NULL,
    words         tsvector,
    UNIQUE (version_id, number)
);
CREATE INDEX ingest_chunk_words ON batchwright.ingest_chunk USING gin (words) WITH (gin_pending_list_limit = 1024)
    WHERE words IS NOT NULL;

CREATE TABLE batchwright.ingest_mention (
    version_id bigint NOT NULL REFERENCES batchwright.ingest_version ON DELETE CASCADE,
    chunk_id   bigint NOT NULL,
    type       text NOT NULL,
    text       text NOT NULL,
    char_start integer NOT NULL,
    char_end   integer NOT NULL
);
CREATE INDEX ingest_mention_of_version ON batchwright.ingest_mention (version_id);
CREATE INDEX ingest_mention_of_chunk ON batchwright.ingest_mention (chunk_id);

-- Vectors of one embedder in one collection. With pgvector they are in a table of their own, `ingest_vectors_<id>`.
CREATE TABLE batchwright.ingest_space (
    id            integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    collection_id integer NOT NULL REFERENCES batchwright.ingest_collection,
    fingerprint   text NOT NULL,
    model         text,
    dimensions    integer NOT NULL CHECK (dimensions BETWEEN 1 AND 16000),
    has_table     boolean NOT NULL,
    -- Grows with every change, so that a process knows whether what it has in memory is still right.
    changes       bigint NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL,
    UNIQUE (collection_id, fingerprint)
);
-- Where there is no pgvector.
CREATE TABLE batchwright.ingest_vector (
    space_id  integer NOT NULL REFERENCES batchwright.ingest_space ON DELETE CASCADE,
    chunk_id  bigint NOT NULL,
    embedding bytea NOT NULL,
    PRIMARY KEY (space_id, chunk_id)
);

-- Answers of models by content: equal text is paid for once per tenant.
CREATE TABLE batchwright.ingest_answer (
    tenant      text NOT NULL,
    fingerprint text NOT NULL,
    hash        bytea NOT NULL,
    value       bytea NOT NULL,
    tokens      integer,
    used_at     timestamptz NOT NULL,
    PRIMARY KEY (tenant, fingerprint, hash)
);
CREATE INDEX ingest_answer_used ON batchwright.ingest_answer (used_at);

CREATE TABLE batchwright.ingest_run (
    id                 text COLLATE "C" PRIMARY KEY CHECK (id ~ '^run_[0-9a-f]{32}$'),
    tenant             text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    collection_id      integer NOT NULL REFERENCES batchwright.ingest_collection,
    kind               text NOT NULL,
    status             batchwright.run_status NOT NULL DEFAULT 'PENDING',
    sources            jsonb NOT NULL,
    config             jsonb NOT NULL,
    recipe             text NOT NULL,
    lane               text NOT NULL CHECK (lane IN ('realtime', 'batch', 'auto')),
    priority           smallint NOT NULL,
    metadata           jsonb,
    job_id             uuid NOT NULL,
    idempotency_key    text,
    idempotency_digest bytea,
    traceparent        text,
    estimate           jsonb,
    -- In money; what is on its way counts as spent until it is known.
    budget             numeric,
    spent              numeric NOT NULL DEFAULT 0,
    reserved           numeric NOT NULL DEFAULT 0,
    has_unknown_cost   boolean NOT NULL DEFAULT false,
    prompt_tokens      bigint NOT NULL DEFAULT 0,
    completion_tokens  bigint NOT NULL DEFAULT 0,
    calls              bigint NOT NULL DEFAULT 0,
    item_count_total     integer NOT NULL DEFAULT 0,
    item_count_done      integer NOT NULL DEFAULT 0,
    item_count_unchanged integer NOT NULL DEFAULT 0,
    item_count_failed    integer NOT NULL DEFAULT 0,
    item_count_cancelled integer NOT NULL DEFAULT 0,
    retired_count        integer NOT NULL DEFAULT 0,
    skipped            jsonb,
    -- Set when every source was listed; whether nothing was missing decides if documents may be retired.
    listed_at          timestamptz,
    is_complete        boolean,
    parked_reason      text CHECK (parked_reason IN ('budget', 'credential', 'user')),
    parked_message     text,
    error              jsonb,
    deadline_at        timestamptz,
    -- Those that have gathered its requests into batches, the newest last; there is one as long as requests wait.
    gather_job_ids     uuid[] NOT NULL DEFAULT '{}',
    -- Last, by a person: what a batch was refused before that is no reason to park it again.
    resumed_at         timestamptz,
    created_at         timestamptz NOT NULL,
    started_at         timestamptz,
    ended_at           timestamptz,
    CONSTRAINT run_ended_means_a_last_status
        CHECK ((ended_at IS NOT NULL) = (status NOT IN ('PENDING', 'RUNNING', 'PARKED'))),
    CONSTRAINT parked_means_a_reason CHECK ((status = 'PARKED') = (parked_reason IS NOT NULL))
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX ingest_run_idempotency ON batchwright.ingest_run (tenant, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX ingest_run_of_tenant ON batchwright.ingest_run (tenant, id);
CREATE INDEX ingest_run_of_collection ON batchwright.ingest_run (collection_id);
CREATE INDEX ingest_run_open ON batchwright.ingest_run (id) WHERE ended_at IS NULL;
CREATE INDEX ingest_run_ended ON batchwright.ingest_run (ended_at, id) WHERE ended_at IS NOT NULL;

CREATE FUNCTION batchwright.reject_run_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of run %: % to %', NEW.id,
        CASE TG_OP WHEN 'INSERT' THEN 'nothing' ELSE OLD.status::text END, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_run_moves';
END
$$;

CREATE TRIGGER legal_run_moves BEFORE UPDATE OF status ON batchwright.ingest_run FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       (OLD.status = 'PENDING' AND NEW.status IN ('RUNNING', 'PARKED', 'FAILED', 'CANCELLED'))
    OR (OLD.status = 'RUNNING'
        AND NEW.status IN ('PARKED', 'COMPLETED', 'COMPLETED_WITH_ERRORS', 'FAILED', 'CANCELLED'))
    OR (OLD.status = 'PARKED' AND NEW.status IN ('RUNNING', 'FAILED', 'CANCELLED'))
    OR (OLD.status IN ('COMPLETED_WITH_ERRORS', 'FAILED', 'CANCELLED') AND NEW.status = 'RUNNING')
))
EXECUTE FUNCTION batchwright.reject_run_move();

CREATE TRIGGER legal_run_births BEFORE INSERT ON batchwright.ingest_run FOR EACH ROW
WHEN (NEW.status <> 'PENDING')
EXECUTE FUNCTION batchwright.reject_run_move();

-- A document in a run. `step` is the last step that it has reached; `generation` grows when it must begin anew.
CREATE TABLE batchwright.ingest_item (
    id              text COLLATE "C" PRIMARY KEY CHECK (id ~ '^item_[0-9a-f]{32}$'),
    run_id          text COLLATE "C" NOT NULL REFERENCES batchwright.ingest_run ON DELETE CASCADE,
    tenant          text NOT NULL,
    collection_id   integer NOT NULL,
    document_id     bigint NOT NULL,
    source          text NOT NULL,
    name            text NOT NULL,
    etag            text,
    size            bigint,
    metadata        jsonb NOT NULL DEFAULT '{}',
    status          batchwright.item_status NOT NULL DEFAULT 'OPEN',
    step            text NOT NULL DEFAULT 'ENQUEUED',
    generation      integer NOT NULL DEFAULT 1,
    retry_count     integer NOT NULL DEFAULT 0,
    last_error_kind text,
    -- {"step", "kind", "code", "message", "scope"}; `cause` is what failures are grouped by.
    last_error      jsonb,
    cause           text,
    -- The newest last: an item that is retried gets another job. The id is there before the job is.
    job_ids         uuid[] NOT NULL CHECK (cardinality(job_ids) > 0),
    prompt_tokens     bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    cost              numeric NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL,
    ended_at        timestamptz,
    dismissed_at    timestamptz,
    CONSTRAINT item_ended_means_a_last_status CHECK ((ended_at IS NOT NULL) = (status <> 'OPEN')),
    CONSTRAINT failed_means_an_error CHECK (status <> 'FAILED' OR (last_error_kind IS NOT NULL AND cause IS NOT NULL)),
    UNIQUE (run_id, document_id)
) WITH (fillfactor = 70);
CREATE INDEX ingest_item_of_run ON batchwright.ingest_item (run_id, status, id);
CREATE INDEX ingest_item_of_document ON batchwright.ingest_item (document_id);
CREATE INDEX ingest_item_inbox ON batchwright.ingest_item (tenant, cause) WHERE status = 'FAILED' AND dismissed_at IS NULL;

CREATE FUNCTION batchwright.reject_item_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of item %: % to %', NEW.id, OLD.status, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_item_moves';
END
$$;

CREATE TRIGGER legal_item_moves BEFORE UPDATE OF status ON batchwright.ingest_item FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       (OLD.status = 'OPEN' AND NEW.status IN ('DONE', 'UNCHANGED', 'FAILED', 'CANCELLED'))
    OR (OLD.status IN ('FAILED', 'CANCELLED') AND NEW.status = 'OPEN')
))
EXECUTE FUNCTION batchwright.reject_item_move();

-- A step of an item. One that is done is never called again; the key says what it was made of.
CREATE TABLE batchwright.ingest_step (
    item_id     text COLLATE "C" NOT NULL REFERENCES batchwright.ingest_item ON DELETE CASCADE,
    generation  integer NOT NULL,
    step        text NOT NULL,
    state       text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'done')),
    key         text,
    output      jsonb,
    is_reused   boolean NOT NULL DEFAULT false,
    starts      integer NOT NULL DEFAULT 0,
    retry_count integer NOT NULL DEFAULT 0,
    error_kind  text,
    not_before  timestamptz,
    -- {"for": lease|rate|batch|credential|budget|user|backoff, "message"}
    waiting     jsonb,
    started_at  timestamptz,
    ended_at    timestamptz,
    PRIMARY KEY (item_id, generation, step),
    CONSTRAINT done_means_a_key CHECK (state = 'open' OR key IS NOT NULL)
) WITH (fillfactor = 70);

-- A request to a model that was about to be sent, until its answer is stored; one in doubt may have been paid for.
CREATE TABLE batchwright.ingest_call (
    id         text COLLATE "C" PRIMARY KEY,
    tenant     text NOT NULL,
    run_id     text COLLATE "C",
    item_id    text COLLATE "C",
    job_id     uuid NOT NULL,
    claim      bigint NOT NULL,
    kind       text NOT NULL,
    model      text NOT NULL,
    lane       text NOT NULL,
    inputs     integer NOT NULL,
    tokens     bigint NOT NULL,
    cost       numeric,
    -- Its worker has died, or the connection was lost before the answer came.
    is_doubtful boolean NOT NULL DEFAULT false,
    began_at   timestamptz NOT NULL
);
CREATE INDEX ingest_call_of_item ON batchwright.ingest_call (item_id);
CREATE INDEX ingest_call_of_run ON batchwright.ingest_call (run_id);

-- Answers that documents wait for in the batch lane: gathered from many items into few batches. `item_id` is the first
-- that asked. A row in a batch has its place there, until its answer is kept, or it goes back.
CREATE TABLE batchwright.ingest_request (
    tenant      text NOT NULL,
    fingerprint text NOT NULL,
    hash        bytea NOT NULL,
    run_id      text COLLATE "C" NOT NULL REFERENCES batchwright.ingest_run ON DELETE CASCADE,
    item_id     text COLLATE "C" NOT NULL,
    kind        text NOT NULL,
    model       text NOT NULL,
    input       text NOT NULL,
    tokens      integer NOT NULL,
    batch_id    text COLLATE "C",
    line        integer,
    place       integer,
    -- Most inputs of a line that it may stand in, after a longer one was refused.
    pack        integer,
    -- Fields that the server has refused, with commas between them: the request does without.
    left_out    text NOT NULL DEFAULT '',
    failures    integer NOT NULL DEFAULT 0,
    -- {"kind", "code", "message"}: there will be no answer.
    error       jsonb,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, fingerprint, hash),
    CONSTRAINT in_a_batch_means_a_place CHECK ((batch_id IS NULL) = (line IS NULL) AND (line IS NULL) = (place IS NULL))
);
CREATE INDEX ingest_request_of_run ON batchwright.ingest_request (run_id, created_at) WHERE batch_id IS NULL;
CREATE INDEX ingest_request_of_item ON batchwright.ingest_request (item_id);
CREATE INDEX ingest_request_of_batch ON batchwright.ingest_request (batch_id, line, place) WHERE batch_id IS NOT NULL;
