"""Sends shards of a late batch that no worker has started to an outside provider.

    too slow for its window ─▶ shards that no worker has started, the last first ─▶ estimate the cost ─▶ redirect

Off unless a model has an `overflow_provider`. All shards of a batch together may cost `overflow_cost_max`. The estimate
is committed with each shard that is redirected; if the price is unknown, none is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from batchwright.batches.plan.lines import split
from batchwright.batches.plan.plan import TOKEN_BYTES
from batchwright.batches.plan.planfile import Entry, plan_path, read_entries, safe_name
from batchwright.batches.plan.shards import Shard
from batchwright.batches.progress import EXPRESS_SHARE
from batchwright.batches.send.desk import Desk
from batchwright.batches.store import Batch, Control, OpenShard
from batchwright.batches.toolbox import Toolbox
from batchwright.engine.context import Context
from batchwright.providers.contract import Usage
from batchwright.providers.prices import cost, find_price

OUTPUT_TOKENS = 1000
"""Assumed length of an answer whose request sets no maximum; deliberately high, because it costs money."""
_REPORTED_MAX = 1000
_MAXIMA = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Overflow:
    """Redirects shards to providers, for all batches of a worker process."""

    def __init__(self, tools: Toolbox, desk: Desk) -> None:
        self._tools = tools
        self._desk = desk
        self._reported: set[tuple[str, str]] = set()

    async def relieve(self, control: Control, rate: float, ctx: Context) -> None:
        """Redirect as many shards as cannot be answered in time, at this rate of answers per second."""
        batch = await self._tools.batches.get(control.id, tenant=None)
        if not self._desk.overflows.keys() & set(batch.models or ()):
            return
        spent = batch.overflow_cost
        shards = await self._tools.batches.open_shards(batch.job_id)
        redirected = sum(one.shard.count for one in shards if one.shard.provider is not None)
        late = control.total - control.done - redirected - rate * control.seconds_left * EXPRESS_SHARE
        for one in reversed(shards):
            if late <= 0:
                return
            if not one.is_untouched or one.shard.model not in self._desk.overflows:
                continue
            if (cost := await self._redirect(batch, one, spent, ctx)) is not None:
                late -= one.shard.count
                spent += cost

    async def _redirect(self, batch: Batch, one: OpenShard, spent: float, ctx: Context) -> float | None:
        """Give a shard to its provider, if nothing prevents it; returns its estimated cost."""
        plan, most = self._desk.overflows[one.shard.model], self._desk.cost_max(one.shard.model)
        shard = replace(one.shard, provider=plan.provider, provider_model=plan.model)
        found = await self._weigh(batch, shard, most - spent)
        if isinstance(found, str):
            self._report(ctx, shard, found)
            return None
        if not await self._tools.batches.redirect(batch, one, shard, found, cost_max=most):
            return None  # another worker has started it, or redirected others meanwhile
        text = f"{shard.count} requests go to {plan.provider}, because the batch would be late"
        ctx.emit("batch.overflowed", text, model=shard.model, cost=found, provider=plan.provider, shard=shard.number)
        return found

    async def _weigh(self, batch: Batch, shard: Shard, left: float) -> float | str:
        """The estimated cost of a shard at its provider, with its requests written; or why it must not go there."""
        plan, input = self._desk.overflows[shard.model], self._tools.workspace.input(batch.id)
        if (missing := self._desk.directory.get(plan.provider).missing_credentials()) is not None:
            return missing
        if await self._desk.find_hold(plan.provider) is not None:
            return f"{plan.provider} refuses its credential"
        with self._tools.workspace.use(batch.id) as folder:
            path = plan_path(folder, safe_name(shard.model))
            entries = await asyncio.to_thread(read_entries, path, shard.start, shard.count)
            if len(entries) > plan.requests_max or sum(entry.length for entry in entries) > plan.bytes_max:
                return f"a shard of {len(entries)} requests is too large for {plan.provider}"
            price = self._price(shard, await asyncio.to_thread(_guess_usages, input, entries))
            if price is None:
                return f"the price of {plan.model} at {plan.provider} is unknown"
            if price > left:
                return f"the overflow would cost more than {self._desk.cost_max(shard.model)}"
            if problems := await self._desk.prepare(batch, [shard], input, folder):
                return f"line {problems[0].line}: {problems[0].message}"
        return price

    def _price(self, shard: Shard, usages: Sequence[Usage]) -> float | None:
        assert shard.provider is not None
        directory = self._desk.directory
        prices, kind = directory.settings(shard.provider).prices, directory.kind(shard.provider).name
        price = find_price(prices, kind, shard.provider_model)
        costs = [cost(price, one) for one in usages]
        return None if None in costs else sum(one or 0.0 for one in costs)

    def _report(self, ctx: Context, shard: Shard, why: str) -> None:
        """Report each reason why shards are not redirected only once."""
        if (shard.batch_id, why) not in self._reported:
            if len(self._reported) >= _REPORTED_MAX:
                self._reported.clear()
            self._reported.add((shard.batch_id, why))
            text = f"shard {shard.number} would be late, but is not sent to {shard.provider}: {why}"
            ctx.emit("batch.overflow_refused", text, level="warning", model=shard.model, shard=shard.number)


def _guess_usages(input: Path, entries: Sequence[Entry]) -> list[Usage]:
    """The estimated maximum usage of each of these requests. Blocks."""
    usages = []
    descriptor = os.open(input, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for entry in entries:
            body = orjson.loads(split(os.pread(descriptor, entry.length, entry.offset))[2])
            maxima = [body[name] for name in _MAXIMA if isinstance(body.get(name), int)]
            output = max(maxima, default=OUTPUT_TOKENS) * (body["n"] if isinstance(body.get("n"), int) else 1)
            usages.append(Usage(input_tokens=entry.length // TOKEN_BYTES, output_tokens=output))
    finally:
        os.close(descriptor)
    return usages
