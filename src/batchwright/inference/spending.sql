-- What was spent on models, by tenant and day.

-- name: add
INSERT INTO batchwright.spending AS spending (
    tenant, day, model, lane, calls, unpriced, prompt_tokens, completion_tokens, cost)
VALUES (
    %(tenant)s, (:now AT TIME ZONE 'UTC')::date, %(model)s, %(lane)s, %(calls)s, %(unpriced)s, %(prompt_tokens)s,
    %(completion_tokens)s, %(cost)s)
ON CONFLICT (tenant, day, model, lane) DO UPDATE SET
    calls = spending.calls + excluded.calls,
    unpriced = spending.unpriced + excluded.unpriced,
    prompt_tokens = spending.prompt_tokens + excluded.prompt_tokens,
    completion_tokens = spending.completion_tokens + excluded.completion_tokens,
    cost = spending.cost + excluded.cost
RETURNING spending.day

-- part: sums
coalesce(sum(spending.calls), 0)::bigint, coalesce(sum(spending.unpriced), 0)::bigint,
coalesce(sum(spending.prompt_tokens), 0)::bigint, coalesce(sum(spending.completion_tokens), 0)::bigint,
coalesce(sum(spending.cost), 0)

-- part: period
FROM batchwright.spending AS spending
WHERE (%(tenant)s::text IS NULL OR spending.tenant = %(tenant)s)
    AND spending.day >= (:now AT TIME ZONE 'UTC')::date - (%(days)s::integer - 1)

-- name: by_model
SELECT spending.tenant, spending.model, spending.lane, :sums
:period
GROUP BY spending.tenant, spending.model, spending.lane
ORDER BY sum(spending.cost) DESC, sum(spending.calls) DESC, spending.tenant, spending.model, spending.lane
LIMIT %(limit)s

-- name: total
SELECT :sums
:period

-- name: forget
DELETE FROM batchwright.spending
WHERE (tenant, day, model, lane) IN (
    SELECT old.tenant, old.day, old.model, old.lane FROM batchwright.spending AS old
    WHERE old.day < (:now AT TIME ZONE 'UTC')::date - %(days)s::integer
    LIMIT %(limit)s)
RETURNING day
