-- What rounds of upkeep need besides the verbs of jobs.

-- name: make_event_partitions
SELECT batchwright.make_event_partitions(:now)

-- name: lock_round
SELECT pg_try_advisory_xact_lock(hashtextextended('batchwright.upkeep.' || %(round)s, 0))
