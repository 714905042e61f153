-- What a batch waits for, and lines that are sent again.
-- serves: 0.1.0

-- What keeps a batch waiting, as a worker saw it last. A note that nobody repeats is out of date after some minutes.
ALTER TABLE batchwright.batch
    DROP COLUMN full_disks,
    DROP COLUMN full_disk_at,
    ADD COLUMN waiting_reason  text CHECK (waiting_reason IN ('disk', 'store')),
    ADD COLUMN waiting_message text,
    ADD COLUMN waiting_at      timestamptz,
    -- How often the files could not be written because lines had no answer, and those lines were sent again.
    ADD COLUMN resends         integer NOT NULL DEFAULT 0,
    ADD CONSTRAINT a_wait_has_a_time CHECK ((waiting_reason IS NULL) = (waiting_at IS NULL));

DROP TRIGGER legal_batch_moves ON batchwright.batch;
CREATE TRIGGER legal_batch_moves BEFORE UPDATE OF status ON batchwright.batch FOR EACH ROW
WHEN (OLD.status <> NEW.status AND NOT (
       (OLD.status = 'validating' AND NEW.status IN ('in_progress', 'failed', 'expired', 'cancelling'))
    OR (OLD.status = 'in_progress' AND NEW.status IN ('finalizing', 'failed', 'expired', 'cancelling'))
    OR (OLD.status = 'finalizing' AND NEW.status IN ('in_progress', 'completed', 'failed', 'cancelling'))
    OR (OLD.status = 'cancelling' AND NEW.status IN ('cancelled', 'failed'))
))
EXECUTE FUNCTION batchwright.reject_batch_move();
