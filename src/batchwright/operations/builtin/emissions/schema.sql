-- The tables of the emissions operations; every statement can be repeated.

-- name: exists
SELECT to_regclass('emissions.total') IS NOT NULL

-- name: lock
SELECT pg_advisory_xact_lock(hashtextextended('batchwright emissions schema', 0))

-- name: create
CREATE SCHEMA IF NOT EXISTS emissions;

-- One file that was read. It is staged until it becomes current, and retired when a newer one replaces it.
CREATE TABLE IF NOT EXISTS emissions.dataset (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id      uuid NOT NULL,
    tenant      text NOT NULL,
    dataset_key text NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('entries', 'factors', 'units')),
    module      text,
    data_type   text NOT NULL,
    target      text NOT NULL,
    method      text NOT NULL,
    year        integer,
    file_name   text NOT NULL,
    sha256      text NOT NULL,
    bytes       bigint NOT NULL,
    next_offset bigint NOT NULL CHECK (next_offset BETWEEN 0 AND bytes),
    next_line   bigint NOT NULL,
    rows_ok     bigint NOT NULL DEFAULT 0,
    rows_bad    bigint NOT NULL DEFAULT 0,
    errors_kept integer NOT NULL DEFAULT 0,
    units       text[] NOT NULL DEFAULT '{}',
    is_current  boolean NOT NULL DEFAULT false,
    created_at  timestamptz NOT NULL DEFAULT now(),
    current_at  timestamptz,
    retired_at  timestamptz,
    CONSTRAINT current_is_not_retired CHECK (NOT is_current OR (current_at IS NOT NULL AND retired_at IS NULL))
);

CREATE UNIQUE INDEX IF NOT EXISTS dataset_staging ON emissions.dataset (job_id)
    WHERE NOT is_current AND retired_at IS NULL;
CREATE UNIQUE INDEX IF NOT EXISTS dataset_current ON emissions.dataset (tenant, dataset_key) WHERE is_current;
CREATE INDEX IF NOT EXISTS dataset_of_module ON emissions.dataset (tenant, module, year) WHERE is_current;
CREATE INDEX IF NOT EXISTS dataset_of_key ON emissions.dataset (tenant, dataset_key, id);

CREATE TABLE IF NOT EXISTS emissions.entry (
    dataset_id        bigint NOT NULL REFERENCES emissions.dataset,
    line              bigint NOT NULL,
    reference         text NOT NULL,
    organisation_unit text NOT NULL,
    activity          text NOT NULL,
    entry_date        date NOT NULL,
    amount            numeric NOT NULL CHECK (amount >= 0),
    unit              text NOT NULL,
    PRIMARY KEY (dataset_id, line),
    UNIQUE (dataset_id, reference)
);

CREATE TABLE IF NOT EXISTS emissions.row_error (
    dataset_id  bigint NOT NULL REFERENCES emissions.dataset,
    line        bigint NOT NULL,
    column_name text NOT NULL,
    value       text,
    reason      text NOT NULL,
    PRIMARY KEY (dataset_id, line, column_name)
);

CREATE TABLE IF NOT EXISTS emissions.unit (
    tenant     text NOT NULL,
    code       text NOT NULL,
    dimension  text NOT NULL,
    to_base    numeric NOT NULL CHECK (to_base > 0),
    name       text NOT NULL,
    dataset_id bigint NOT NULL REFERENCES emissions.dataset,
    retired_at timestamptz,
    PRIMARY KEY (tenant, code)
);

CREATE TABLE IF NOT EXISTS emissions.factor (
    tenant      text NOT NULL,
    module      text NOT NULL,
    year        integer NOT NULL,
    activity    text NOT NULL,
    unit        text NOT NULL,
    kg_per_unit numeric NOT NULL CHECK (kg_per_unit >= 0),
    dataset_id  bigint NOT NULL REFERENCES emissions.dataset,
    PRIMARY KEY (tenant, module, year, activity)
);

CREATE TABLE IF NOT EXISTS emissions.total (
    tenant            text NOT NULL,
    module            text NOT NULL,
    year              integer NOT NULL,
    organisation_unit text NOT NULL,
    activity          text NOT NULL,
    kg_co2e           numeric NOT NULL,
    rows              bigint NOT NULL,
    computed_by       uuid NOT NULL,
    computed_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, module, year, organisation_unit, activity)
);
