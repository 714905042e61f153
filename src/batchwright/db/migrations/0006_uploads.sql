-- Uploads: a large file that comes in parts.
-- serves: 0.1.0

CREATE TYPE batchwright.upload_status AS ENUM ('pending', 'completed', 'cancelled', 'expired');

-- Its file exists from the commit that completes it. One whose time is over counts as expired at once; upkeep writes it
-- down. `over_at` is when it ends or has ended: from then on nobody needs its parts.
CREATE TABLE batchwright.upload (
    id              text COLLATE "C" PRIMARY KEY CHECK (id ~ '^upload_[0-9a-f]{32}$'),
    tenant          text NOT NULL CHECK (length(tenant) BETWEEN 1 AND 100),
    status          batchwright.upload_status NOT NULL DEFAULT 'pending',
    purpose         text NOT NULL CHECK (length(purpose) BETWEEN 1 AND 64),
    filename        text NOT NULL CHECK (length(filename) BETWEEN 1 AND 512),
    mime_type       text NOT NULL,
    bytes           bigint NOT NULL CHECK (bytes >= 0),
    expires_seconds integer,
    parts           integer NOT NULL DEFAULT 0,
    part_bytes      bigint NOT NULL DEFAULT 0,
    part_ids        text[],
    file_id         text COLLATE "C",
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz NOT NULL,
    over_at         timestamptz NOT NULL,
    parts_gone_at   timestamptz,
    CONSTRAINT completed_means_a_file
        CHECK ((status = 'completed') = (file_id IS NOT NULL AND part_ids IS NOT NULL)),
    CONSTRAINT parts_go_after_the_end CHECK (parts_gone_at IS NULL OR status <> 'pending')
) WITH (fillfactor = 50);
CREATE INDEX upload_leftovers ON batchwright.upload (over_at, id) WHERE parts_gone_at IS NULL;
CREATE INDEX upload_ended ON batchwright.upload (over_at, id) WHERE parts_gone_at IS NOT NULL;

-- A part that is in the store as a whole; its bytes are the object `key`.
CREATE TABLE batchwright.upload_part (
    id         text COLLATE "C" PRIMARY KEY CHECK (id ~ '^part_[0-9a-f]{32}$'),
    upload_id  text COLLATE "C" NOT NULL REFERENCES batchwright.upload ON DELETE CASCADE,
    bytes      bigint NOT NULL CHECK (bytes >= 0),
    key        text NOT NULL,
    created_at timestamptz NOT NULL
);
CREATE INDEX upload_part_of_upload ON batchwright.upload_part (upload_id);

CREATE FUNCTION batchwright.reject_upload_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'illegal move of upload %: % to %', NEW.id, OLD.status, NEW.status
        USING ERRCODE = 'check_violation', CONSTRAINT = 'legal_upload_moves';
END
$$;

CREATE TRIGGER legal_upload_moves BEFORE UPDATE OF status ON batchwright.upload FOR EACH ROW
WHEN (OLD.status <> NEW.status AND OLD.status <> 'pending')
EXECUTE FUNCTION batchwright.reject_upload_move();
