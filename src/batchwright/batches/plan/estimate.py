"""Estimates the tokens and the cost of a batch from its input; all numbers of tokens are rules of thumb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchwright.batches.plan.plan import Draft
from batchwright.inference.prices import Price, cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One model's requests, and what they will cost."""

    model: str
    requests: int
    bytes: int
    prompt_tokens: int
    shared_tokens: int
    """The part of these tokens in prefixes that another prompt shares: a prefix cache may save them."""
    groups: int
    """Runs of requests that share the same long beginning, and are sent one after the other."""
    output_tokens: int
    """As assumed, but for no request more than its own maximum."""
    output_tokens_max: int | None
    """What the requests allow; None if one of them sets no maximum."""
    written: int
    """Requests whose answers have tokens."""
    bounded: int
    """The number of those that set a maximum."""
    cost: float | None
    """Without any cache; None if the model has no price."""
    cost_cached: float | None
    """If a prefix cache saves all of the shared tokens, at the price of cached ones."""


def estimate(draft: Draft, prices: Mapping[str, Price], *, output_tokens: int) -> list[Estimate]:
    """By model, the largest first; an answer is assumed to have `output_tokens`, or its maximum if that is less."""
    found = [_of_model(draft, model, prices, output_tokens) for model in draft.models]
    return sorted(found, key=lambda one: (-one.requests, one.model))


def total_cost(estimates: list[Estimate]) -> tuple[float, float] | None:
    """With a full cache and without any; None if a model has no price, because a partial sum would mislead."""
    low, high = [one.cost_cached for one in estimates], [one.cost for one in estimates]
    if not estimates or None in low or None in high:
        return None
    return sum(one or 0.0 for one in low), sum(one or 0.0 for one in high)


def output_tokens_max(estimates: Sequence[Estimate]) -> int | None:
    """What all requests together allow; None if one of them sets no maximum."""
    found = [one.output_tokens_max for one in estimates]
    return None if None in found else sum(one or 0 for one in found)


def _of_model(draft: Draft, model: str, prices: Mapping[str, Price], output_tokens: int) -> Estimate:
    plan = draft.plan(model)
    maxima = draft.models[model].maxima
    written = len(plan.entries) - draft.models[model].silent
    output = output_tokens * (written - len(maxima)) + sum(min(output_tokens, most) for most in maxima)
    usage = {"input": plan.prompt_tokens, "output": output}
    return Estimate(
        model=model,
        requests=len(plan.entries),
        bytes=plan.bytes,
        prompt_tokens=plan.prompt_tokens,
        shared_tokens=plan.shared_tokens,
        groups=plan.groups,
        output_tokens=output,
        output_tokens_max=sum(maxima) if len(maxima) == written else None,
        written=written,
        bounded=len(maxima),
        cost=cost({model: usage}, prices),
        cost_cached=cost({model: {**usage, "cached": plan.shared_tokens}}, prices),
    )
