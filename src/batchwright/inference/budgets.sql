-- Rates that all workers share: a bucket per gateway that holds what one second brings, and at least one request.

-- name: take
-- Transactions that wait for each other see the time in another order; a clock that was set back is believed.
INSERT INTO batchwright.budget AS budget (name, requests, tokens, refilled_at)
VALUES (%(name)s, %(requests_room)s, %(tokens_room)s, :now)
ON CONFLICT (name) DO UPDATE
SET requests = least(%(requests_room)s, budget.requests
        + %(requests_rate)s * greatest(0, extract(epoch FROM :now - budget.refilled_at))),
    tokens = least(%(tokens_room)s, budget.tokens
        + %(tokens_rate)s * greatest(0, extract(epoch FROM :now - budget.refilled_at))),
    refilled_at = greatest(:now, least(budget.refilled_at, :now + interval '1 second'))
RETURNING requests, tokens

-- name: spend
UPDATE batchwright.budget SET requests = requests - %(requests)s, tokens = tokens - %(tokens)s
WHERE name = %(name)s

-- name: workers
SELECT count(*) FROM batchwright.worker
WHERE heartbeat_at > :now - make_interval(secs => %(silent_seconds)s) AND stopping_at IS NULL
    AND %(operation)s = ANY(operations)
