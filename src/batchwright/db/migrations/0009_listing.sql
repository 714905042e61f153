-- A move of a job writes less: lists walk a table of their own, and the next version of a row finds room beside it.
-- serves: 0.1.0

-- Every job is written at least three times: when it comes, when it starts and when it ends. Pages that begin half full
-- have room for the versions that follow, and none is split or added for them: in the end there are fewer pages.
ALTER TABLE batchwright.job SET (fillfactor = 50);
ALTER INDEX batchwright.job_pkey SET (fillfactor = 50);

-- A job enters the listing once; an index on the jobs themselves was written by every move.
CREATE TABLE batchwright.listing (
    tenant     text NOT NULL,
    created_at timestamptz NOT NULL,
    id         uuid NOT NULL
);

-- The tables agree after every statement, whoever runs it.
CREATE FUNCTION batchwright.list_jobs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO batchwright.listing (tenant, created_at, id) SELECT tenant, created_at, id FROM born;
    RETURN NULL;
END
$$;

-- It finds each row by the key, whatever the statistics say.
CREATE FUNCTION batchwright.unlist_jobs() RETURNS trigger
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    DELETE FROM batchwright.listing USING gone
    WHERE listing.tenant = gone.tenant AND listing.created_at = gone.created_at AND listing.id = gone.id;
    RETURN NULL;
END
$$;

-- Making a trigger keeps writers out, so no job is missed by the copy.
CREATE TRIGGER list_jobs AFTER INSERT ON batchwright.job REFERENCING NEW TABLE AS born
FOR EACH STATEMENT EXECUTE FUNCTION batchwright.list_jobs();

CREATE TRIGGER unlist_jobs AFTER DELETE ON batchwright.job REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION batchwright.unlist_jobs();

INSERT INTO batchwright.listing (tenant, created_at, id) SELECT tenant, created_at, id FROM batchwright.job;

-- The list's question: which jobs of this tenant came before that one?
ALTER TABLE batchwright.listing ADD PRIMARY KEY (tenant, created_at, id);

DROP INDEX batchwright.job_listed;

-- As before, but asking the listing which jobs there are.
CREATE OR REPLACE FUNCTION batchwright.drop_event_partition(
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
                (SELECT tenant FROM batchwright.listing ORDER BY tenant LIMIT 1)
                UNION ALL
                SELECT (SELECT next.tenant FROM batchwright.listing AS next WHERE next.tenant > known.tenant
                        ORDER BY next.tenant LIMIT 1)
                FROM known WHERE known.tenant IS NOT NULL
            )
            SELECT old.id
            FROM known CROSS JOIN LATERAL (
                SELECT listing.id FROM batchwright.listing
                WHERE listing.tenant = known.tenant AND listing.created_at < created_before
                ORDER BY listing.created_at, listing.id
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
