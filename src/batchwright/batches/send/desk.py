"""What a worker process knows about the outside providers that answer requests of batches.

    model_gateways ─▶ plans ─▶ shards, each as large as a job there may be ─▶ prepare ─▶ checked files of requests

The requests of a shard have their own file in the store. It is written once, before any worker can send it. The
custom_id of each of its lines is the id of that line in our result files: every provider accepts it, and it identifies
the line of an answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orjson import dumps

from batchwright.batches.journal.envelopes import RequestIds
from batchwright.batches.plan.lines import MIXED, Problem, split
from batchwright.batches.plan.plan import TOKEN_BYTES
from batchwright.batches.plan.planfile import Entry, plan_path, read_entries, safe_name
from batchwright.batches.plan.shards import ProviderPlan, Shard
from batchwright.batches.store import Batch
from batchwright.engine.owned import Held
from batchwright.errors import ConfigurationError, Fatal, InvalidInput, OperationError
from batchwright.inference.settings import GatewaySettings
from batchwright.providers import contract
from batchwright.providers.directory import Directory
from batchwright.providers.errand import CredentialRefused, Errand, Owner
from batchwright.providers.jobs import Hold, RemoteJob, RemoteJobs
from batchwright.providers.tasks import Tasks
from batchwright.storage import Store, Stored

UNSUPPORTED = "unsupported_by_provider"
"""The code of requests that a provider does not accept, in the errors of a batch."""
_BYTES_SHARE = 0.9
"""The share of a provider's size limit that we use: its own format of a request may be longer than OpenAI's."""
_CHUNK_BYTES = 1024 * 1024
_UNLIMITED = 2**40
_NO_KEY = "bw-" + "0" * 26


@dataclass(frozen=True)
class Desk:
    """Created once by the runtime."""

    directory: Directory
    jobs: RemoteJobs
    models: Mapping[str, GatewaySettings]
    store: Store

    @cached_property
    def plans(self) -> Mapping[str, ProviderPlan]:
        """Models that go to a provider; ConfigurationError if the provider is unknown or cannot answer requests."""
        return {model: self._plan(model, one.provider, one) for model, one in self.models.items() if one.provider}

    @cached_property
    def overflows(self) -> Mapping[str, ProviderPlan]:
        """Models that go to servers of our own, and to a provider when their batch would be late."""
        found = {model: one for model, one in self.models.items() if one.overflow_provider}
        return {model: self._plan(model, one.overflow_provider or "", one) for model, one in found.items()}

    def cost_max(self, model: str) -> float:
        """Maximum cost of all shards of a batch that go to a provider because it would be late."""
        return self.models[model].overflow_cost_max or 0.0

    @property
    def providers(self) -> set[str]:
        return {plan.provider for plan in (*self.plans.values(), *self.overflows.values())}

    def _plan(self, model: str, provider: str, settings: GatewaySettings) -> ProviderPlan:
        try:
            abilities = self.directory.get(provider).abilities
        except InvalidInput as error:
            raise ConfigurationError(f'model_gateways."{model}": {error}') from error
        if "completion" not in abilities.task_types:
            able = ", ".join(self.directory.can_do("completion"))
            raise ConfigurationError(
                f'model_gateways."{model}" has the provider {provider!r}, which does not answer such requests; '
                f"use one of {able}"
            )
        bytes_max = int((abilities.request_bytes_max or _UNLIMITED) * _BYTES_SHARE)
        if settings.provider_tokens_max is not None:
            bytes_max = max(1, min(bytes_max, settings.provider_tokens_max * TOKEN_BYTES))
        return ProviderPlan(
            provider=provider,
            model=settings.provider_model or model,
            requests_max=abilities.requests_max or _UNLIMITED,
            bytes_max=bytes_max,
        )

    # While a batch is planned -----------------------------------------------------------------------------------

    async def prepare(self, batch: Batch, shards: Sequence[Shard], input: Path, folder: Path) -> list[Problem]:
        """Write the requests of the shards that go to a provider; returns those that a provider does not accept."""
        problems: list[Problem] = []
        for shard in shards:
            if shard.provider is None:
                continue
            if batch.endpoint == MIXED:
                message = f"The model {shard.model!r} goes to {shard.provider}, whose batches have one endpoint each."
                return [Problem(code=UNSUPPORTED, line=None, message=message, param="endpoint")]
            plan = plan_path(folder, safe_name(shard.model))
            entries = await asyncio.to_thread(read_entries, plan, shard.start, shard.count)
            descriptor = os.open(input, os.O_RDONLY | os.O_CLOEXEC)
            try:
                stored = await self.write_requests(shard, shard.name, descriptor, entries)
                found = await self._inspect(shard, batch.endpoint, stored)
                problems += await asyncio.to_thread(_translate, found, shard.provider, descriptor, entries)
            finally:
                os.close(descriptor)
        return problems

    async def write_requests(self, shard: Shard, name: str, descriptor: int, entries: Sequence[Entry]) -> Stored:
        """Write the lines as one file into the store, under a name that was never used for other lines."""
        ids = RequestIds(shard.batch_id)

        async def chunks() -> AsyncIterator[bytes]:
            for some in _slices(entries):
                yield await asyncio.to_thread(_write_lines, descriptor, some, ids)

        return await self.store.put(requests_key(shard, name), chunks)

    async def _inspect(self, shard: Shard, endpoint: str, stored: Stored) -> Sequence[contract.Problem]:
        assert shard.provider is not None
        adapter = self.directory.get(shard.provider)
        request = self.request(_NO_KEY, shard, shard.name, endpoint, size=stored.size)
        return [*adapter.validate(request)] or await adapter.inspect(request)

    # While its shards are at a provider -------------------------------------------------------------------------

    def request(self, key: str, shard: Shard, name: str, endpoint: str, size: int | None = None) -> contract.Request:
        uri = f"file:{requests_key(shard, name)}"
        input = contract.Input(id=name, uri=uri, filename=f"{shard.batch_id}-{name}.jsonl", bytes=size)
        return contract.Request(
            key=key,
            task_type="completion",
            model=shard.provider_model,
            inputs=[input],
            options={"endpoint": endpoint},
        )

    def errand(self, row: RemoteJob, shard: Shard, endpoint: str, owner: Owner, held: Held) -> Errand:
        request = self.request(row.key, shard, row.input_ids[0], endpoint)
        adapter, pace = self.directory.get(row.provider), self.directory.pace(row.provider)
        return Errand(self.jobs, adapter, row, request, owner, held, pace)

    async def find_hold(self, provider: str) -> Hold | None:
        """The hold if the provider refuses our credential. When a check is due, one process tries the credential."""
        hold = (await self.jobs.holds()).get(provider)
        if hold is None or hold.try_seconds > 0 or not await self.jobs.may_try(provider):
            return hold
        try:
            await self.directory.get(provider).check()
        except OperationError:
            return hold
        await self.jobs.release(provider)
        await Tasks(self.jobs.queue).wake_parked(provider)
        return None

    async def hold(self, refused: CredentialRefused) -> None:
        await self.jobs.hold(refused.provider, refused.error.code, str(refused.error))


def requests_key(shard: Shard, name: str) -> str:
    """Where the store keeps the requests of a shard; they are removed with the answers of the batch."""
    return f"batches/{shard.batch_id}/provider/{name}.jsonl"


def _slices(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    start, size = 0, 0
    for end, entry in enumerate(entries):
        size += entry.length
        if size >= _CHUNK_BYTES:
            yield entries[start : end + 1]
            start, size = end + 1, 0
    if start < len(entries):
        yield entries[start:]


def _write_lines(descriptor: int, entries: Sequence[Entry], ids: RequestIds) -> bytes:
    """Blocks."""
    lines = []
    for entry in entries:
        _, url, body = split(os.pread(descriptor, entry.length, entry.offset))
        id = ids.in_files(entry.offset).encode()
        lines.append(b'{"custom_id":"%b","method":"POST","url":%b,"body":%b}\n' % (id, dumps(url), body.strip()))
    return b"".join(lines)


def _translate(
    found: Sequence[contract.Problem], provider: str, descriptor: int, entries: Sequence[Entry]
) -> list[Problem]:
    """Problems with lines of the file of requests, mapped to the lines of the input. Blocks."""
    problems = []
    for one in found:
        line = None if one.line is None else _line_number(descriptor, entries[one.line - 1].offset)
        message = one.message if one.line is None else one.message.removeprefix(f"line {one.line}: ")
        text = f"{provider} does not accept this: {message}"
        problems.append(Problem(code=UNSUPPORTED, line=line, message=text, param=one.param))
    return problems


def _line_number(descriptor: int, offset: int) -> int:
    """The number of a line, counted from 1; blank lines count."""
    number, position = 1, 0
    while position < offset:
        data = os.pread(descriptor, min(_CHUNK_BYTES, offset - position), position)
        if not data:
            raise Fatal("the input file was cut while it was read", code="input_damaged")
        number += data.count(b"\n")
        position += len(data)
    return number
