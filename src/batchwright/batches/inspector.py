"""Checks an uploaded file before a batch is created from it, like `batch check`, and estimates cost and time."""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from batchwright.batches.journal.workspace import fetch_object
from batchwright.batches.plan.estimate import Estimate, total_cost
from batchwright.batches.plan.inspect import Inspection, find_endpoint, inspect
from batchwright.batches.plan.plan import Rules
from batchwright.batches.plan.planner import run_apart
from batchwright.batches.settings import BatchSettings
from batchwright.core import Core
from batchwright.engine.samples import DAY
from batchwright.errors import InvalidInput
from batchwright.files.store import File, Files

OUTPUT_TOKENS = 250
"""Assumed for each answer, as `batch check` does."""
_KEPT_MAX = 16
_AT_ONCE = 2
_BUSY_SHARE = 0.1
"""Steps in which a model answered less than this share of its best step were not busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A file that was checked."""

    file: File
    refusal: str | None
    """Why it cannot be checked at all, such as an unknown endpoint."""
    inspection: Inspection | None
    cost: float | None
    """None if a model has no price."""
    cost_cached: float | None
    """The cost if a prefix cache saves all that it can."""
    seconds: float | None
    """At the pace of the last day; None for models that got no requests then."""

    @property
    def can_run(self) -> bool:
        return self.inspection is not None and not self.inspection.problems_total and self.inspection.requests > 0


class Inspector:
    """Checks files of all tenants; keeps the latest results for repeated requests."""

    def __init__(self, core: Core, files: Files, settings: BatchSettings) -> None:
        self._core = core
        self._files = files
        self._settings = settings
        self._known: OrderedDict[tuple[str, str | None], Inspection | InvalidInput] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def check(self, file: File, *, endpoint: str | None = None) -> Checked:
        found = await self._inspect(file, endpoint)
        if isinstance(found, InvalidInput):
            return Checked(file=file, refusal=str(found), inspection=None, cost=None, cost_cached=None, seconds=None)
        costs = total_cost(list(found.estimates))
        return Checked(
            file=file,
            refusal=None,
            inspection=found,
            cost=None if costs is None else costs[1],
            cost_cached=None if costs is None else costs[0],
            seconds=await self._estimate_seconds(found.estimates),
        )

    async def _inspect(self, file: File, endpoint: str | None) -> Inspection | InvalidInput:
        key = (file.sha256, endpoint)
        async with self._turns:
            if key not in self._known:
                self._known[key] = await self._read(file, endpoint)
                if len(self._known) > _KEPT_MAX:
                    self._known.popitem(last=False)
            return self._known[key]

    async def _read(self, file: File, endpoint: str | None) -> Inspection | InvalidInput:
        async with self._local_copy(file) as path:
            try:
                where = await asyncio.to_thread(find_endpoint, path, endpoint)
            except InvalidInput as error:
                return InvalidInput(str(error).replace(str(path), file.filename))
            models = frozenset(self._core.settings.model_gateways) or None
            rules = Rules(endpoint=where, limits=self._settings.limits, models=models)
            prices = dict(self._settings.prices)
            return await run_apart(inspect, path, rules, prices, OUTPUT_TOKENS, size=file.bytes)

    @asynccontextmanager
    async def _local_copy(self, file: File) -> AsyncIterator[Path]:
        path = self._files.store.local_path(file.key)
        if path is not None:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "input.jsonl"
            await fetch_object(self._files.store, file.key, copy)
            yield copy

    async def _estimate_seconds(self, estimates: Iterable[Estimate]) -> float | None:
        """Models run at the same time, so the slowest one counts."""
        paces = await self._paces()
        seconds = [one.requests / paces[one.model] if paces.get(one.model) else None for one in estimates]
        known = [one for one in seconds if one is not None]
        return max(known) if known and len(known) == len(seconds) else None

    async def _paces(self) -> Mapping[str, float]:
        """Answers per second of each model in the last day, in the steps in which it was busy."""
        rates: dict[str, list[float]] = {}
        for point in await self._core.samples.read(DAY):
            for model, rate in point.rates.get("requests", {}).items():
                rates.setdefault(model, []).append(rate)
        found = {}
        for model, all_rates in rates.items():
            busy = [rate for rate in all_rates if rate > max(all_rates) * _BUSY_SHARE]
            if busy:
                found[model] = sum(busy) / len(busy)
        return found
