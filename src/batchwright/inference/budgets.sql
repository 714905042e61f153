-- Rates that all workers share: a bucket per gateway or provider. It holds the refill of one second, and at least one
-- request. A level below zero is a debt. A statement that changes a budget locks its row first, and then its slots.

-- part: held
-- A crash of the server loses less than a second of spending, so commits do not wait for the disk.
held AS MATERIALIZED (
    SELECT * FROM batchwright.budget
    WHERE name = %(name)s AND set_config('synchronous_commit', 'off', true) IS NOT NULL
    FOR UPDATE
)

-- part: level
-- The current level. Transactions that wait for each other see times out of order; a clock that was set back is
-- trusted. While the share grows, the mean of the old and the new rate applies to the time between.
aged AS (
    SELECT *, greatest(0, extract(epoch FROM :now - refilled_at))::float8 AS seconds FROM held
),
grown AS (
    SELECT *, least(1, share + %(recovery)s * seconds) AS share_now,
        least(%(requests_rate)s::float8, requests_limit) AS requests_full,
        least(%(tokens_rate)s::float8, tokens_limit) AS tokens_full
    FROM aged
),
level AS MATERIALIZED (
    SELECT *, requests_full * share_now AS requests_speed, tokens_full * share_now AS tokens_speed,
        least(%(requests_room)s, requests + requests_full * (share + share_now) / 2 * seconds) AS requests_now,
        least(%(tokens_room)s, tokens + tokens_full * (share + share_now) / 2 * seconds) AS tokens_now,
        CASE WHEN blocked_until BETWEEN :now AND :now + make_interval(secs => %(block_max)s)
            THEN extract(epoch FROM blocked_until - :now)::float8 ELSE 0 END AS blocked_seconds,
        greatest(:now, least(refilled_at, :now + interval '1 second')) AS seen_at
    FROM grown
)

-- part: waits
-- A request needs a level of at least one; tokens need any level above zero, and may leave a debt.
waits AS MATERIALIZED (
    SELECT *, greatest(0, 1 - requests_now) / requests_speed AS requests_wait,
        greatest(0, -tokens_now) / tokens_speed AS tokens_wait
    FROM level
)

-- name: open
INSERT INTO batchwright.budget (name, requests, tokens, refilled_at)
VALUES (%(name)s, %(requests_room)s, %(tokens_room)s, :now)
ON CONFLICT (name) DO NOTHING

-- name: reserve
-- All or nothing. A refused caller takes nothing, but gets a turn: the next caller in line gets a later one, so that
-- they do not all return at the same time. A turn is not a promise.
WITH :held,
:level,
:waits,
gone AS (
    DELETE FROM batchwright.budget_slot WHERE id IN (
        SELECT slot.id FROM held JOIN batchwright.budget_slot AS slot USING (name)
        WHERE slot.ends_at <= :now
        FOR UPDATE OF slot SKIP LOCKED)
    RETURNING id
),
judged AS MATERIALIZED (
    SELECT *, greatest(blocked_seconds, requests_wait, tokens_wait) AS wait,
        in_use - (SELECT count(*) FROM gone)::integer AS used
    FROM waits
),
decided AS MATERIALIZED (
    SELECT *, coalesce(used < %(concurrency)s::integer, true) AS has_slot,
        wait <= greatest(%(max_wait)s::float8, %(tolerance)s::float8) AS is_soon,
        greatest(%(step_min)s::float8, 1 / requests_speed, %(tokens)s::float8 / tokens_speed,
            coalesce(nullif(held_seconds, 0), 1) / CASE WHEN used >= %(concurrency)s THEN %(concurrency)s END) AS step
    FROM judged
),
answered AS MATERIALIZED (
    SELECT *, has_slot AND is_soon AS is_granted,
        greatest(
            :now + make_interval(secs => greatest(wait, %(wait_min)s::float8)),
            CASE WHEN line_ends_at <= :now + make_interval(secs => %(line_max)s) THEN line_ends_at END
        ) AS turn
    FROM decided
),
written AS (
    UPDATE batchwright.budget
    SET requests = requests_now - is_granted::integer,
        tokens = tokens_now - CASE WHEN is_granted THEN %(tokens)s ELSE 0 END,
        share = share_now,
        refilled_at = seen_at,
        in_use = used + (is_granted AND %(concurrency)s IS NOT NULL)::integer,
        line_ends_at = CASE WHEN is_granted THEN answered.line_ends_at
            ELSE least(turn + make_interval(secs => step), :now + make_interval(secs => %(line_max)s)) END
    FROM answered WHERE budget.name = answered.name
),
slot AS (
    INSERT INTO batchwright.budget_slot (id, name, holder, taken_at, ends_at)
    SELECT %(id)s, name, %(holder)s, :now, :now + make_interval(secs => wait + %(lease)s)
    FROM answered WHERE is_granted AND %(concurrency)s IS NOT NULL
)
SELECT is_granted, CASE WHEN is_granted THEN wait ELSE extract(epoch FROM turn - :now)::float8 END,
    CASE WHEN is_soon AND NOT has_slot THEN 'concurrency' WHEN wait = blocked_seconds THEN 'blocked'
        WHEN wait = requests_wait THEN 'requests' ELSE 'tokens' END
FROM answered

-- name: take
-- Takes what is available, up to the wanted amount. While others wait in line, half of the calls take nothing. A caller
-- that has found nothing for a while gets all that it wants, as a debt, and waits until the debts before it are paid.
WITH :held,
:level,
:waits,
judged AS MATERIALIZED (
    SELECT *, greatest(requests_wait, tokens_wait) AS wait,
        CASE WHEN blocked_seconds > 0 THEN 0
            WHEN greatest(requests_wait, tokens_wait) BETWEEN %(tolerance)s::float8 AND %(debt_max)s::float8 THEN 2
            WHEN line_ends_at > :now AND line_ends_at <= :now + make_interval(secs => %(line_max)s)
                AND %(debt_max)s = 0 AND random() < 0.5 THEN 0
            ELSE 1 END AS way
    FROM waits
),
taken AS MATERIALIZED (
    SELECT *,
        CASE way WHEN 0 THEN 0 WHEN 1 THEN greatest(0, floor(least(requests_now + 1e-6, %(requests)s)))
            ELSE greatest(0, floor(%(requests)s::float8)) END AS requests_taken,
        CASE way WHEN 0 THEN 0 WHEN 1 THEN greatest(0, least(tokens_now, %(tokens)s))
            ELSE greatest(0, %(tokens)s::float8) END AS tokens_taken
    FROM judged
),
written AS (
    UPDATE batchwright.budget
    SET requests = requests_now - requests_taken, tokens = tokens_now - tokens_taken, share = share_now,
        refilled_at = seen_at
    FROM taken WHERE budget.name = taken.name
)
SELECT requests_taken, tokens_taken, CASE way WHEN 2 THEN wait ELSE 0 END FROM taken

-- name: settle
-- Corrects the estimate, frees the slot, and applies what the server reported. A refusal counts only if its request
-- was sent after the last cut: the others say nothing new. Levels are corrected downwards only.
WITH :held,
:level,
slot AS (
    DELETE FROM batchwright.budget_slot WHERE id = %(id)s AND name IN (SELECT name FROM held) RETURNING taken_at
),
heard AS (
    SELECT *, %(is_refused)s AND (:now - make_interval(secs => %(seconds_ago)s::float8) > cut_at OR cut_at IS NULL)
        AS is_cut
    FROM level
),
cut AS MATERIALIZED (
    SELECT *, CASE WHEN is_cut THEN greatest(%(share_min)s::float8, share_now * %(cut_to)s) ELSE share_now END
        AS share_cut,
        (SELECT greatest(0, extract(epoch FROM :now - taken_at))::float8 FROM slot) AS slot_seconds
    FROM heard
),
written AS (
    UPDATE batchwright.budget
    SET requests = least(requests_now + %(requests_back)s::float8, %(requests_room)s, %(requests_left)s::float8,
            1 - %(requests_seconds)s::float8 * requests_speed),
        tokens = least(tokens_now + %(tokens_back)s::float8, %(tokens_room)s, %(tokens_left)s::float8,
            0 - %(tokens_seconds)s::float8 * tokens_speed),
        share = share_cut,
        cut_at = CASE WHEN is_cut THEN :now ELSE cut.cut_at END,
        blocked_until = CASE WHEN %(is_refused)s THEN greatest(cut.blocked_until, :now + make_interval(
            secs => coalesce(%(retry_after)s::float8, CASE WHEN is_cut THEN 1 / share_cut ELSE 0 END)))
            ELSE cut.blocked_until END,
        requests_limit = coalesce(%(requests_limit)s::float8, cut.requests_limit),
        tokens_limit = coalesce(%(tokens_limit)s::float8, cut.tokens_limit),
        in_use = cut.in_use - (slot_seconds IS NOT NULL)::integer,
        held_seconds = CASE WHEN slot_seconds IS NULL THEN cut.held_seconds WHEN cut.held_seconds = 0 THEN slot_seconds
            ELSE 0.8 * cut.held_seconds + 0.2 * slot_seconds END,
        refilled_at = seen_at
    FROM cut WHERE budget.name = cut.name
)
SELECT name FROM cut

-- name: describe
WITH held AS (
    SELECT * FROM batchwright.budget WHERE name = %(name)s
),
:level,
:waits
SELECT requests_now, tokens_now, share_now, requests_wait, tokens_wait, blocked_seconds,
    (SELECT count(*) FROM batchwright.budget_slot AS slot WHERE slot.name = waits.name AND slot.ends_at > :now),
    greatest(0, extract(epoch FROM line_ends_at - :now))::float8,
    CASE WHEN blocked_until > :now THEN blocked_until END
FROM waits

-- name: workers
SELECT count(*) FROM batchwright.worker
WHERE heartbeat_at > :now - make_interval(secs => %(silent_seconds)s) AND stopping_at IS NULL
    AND %(operation)s = ANY(operations)
