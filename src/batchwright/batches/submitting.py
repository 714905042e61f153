"""Creates batches for Python code: checks the options, and writes requests to the store and the database."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from batchwright.batches.requests import Defaults, check_endpoint, find_endpoint
from batchwright.batches.seal import CreatorHeaders
from batchwright.batches.store import NewBatch, window_seconds
from batchwright.batches.submission import IN_FLIGHT_MAX, create, idempotency, is_served, store_input
from batchwright.engine.jobs import DEFAULT_TENANT
from batchwright.engine.metadata import check_metadata
from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.files.local import hash_file
from batchwright.inference.headers import headers_of_creator
from batchwright.inference.settings import NO_GATEWAY
from batchwright.telemetry import tracing

if TYPE_CHECKING:
    from batchwright.batches.part import BatchesPart

_KEY_CHARACTERS_MAX = 255
_TENANT_CHARACTERS_MAX = 100


class BatchOptions(TypedDict, total=False):
    """Options of `submit()` and `batch()`."""

    endpoint: str | None
    """The endpoint of requests that have no `url`; by default /v1/chat/completions."""
    headers: Mapping[str, str]
    """Headers for the model server; only those that a gateway's `passthrough_headers` names."""
    idempotency_key: str | None
    """The same key with the same requests returns the same batch, also after a crash."""
    max_in_flight: int | None
    """Maximum number of requests in flight, per model and worker process."""
    metadata: Mapping[str, str] | None
    model: str | None
    """The model of requests that do not name one."""
    priority: int
    """From 0 (first) to 9 (last); by default 5."""
    tenant: str
    window: str
    """The time in which the batch must end, from `1m` to `30d`; by default `24h`."""


class Wanted(NamedTuple):
    """The options of a batch, checked before anything is read or stored."""

    defaults: Defaults
    headers: Mapping[str, str]
    idempotency_key: str | None
    values: dict[str, Any]

    @classmethod
    def of(cls, options: BatchOptions) -> Wanted:
        if strange := sorted(options.keys() - BatchOptions.__annotations__.keys()):
            known = ", ".join(BatchOptions.__annotations__)
            raise InvalidInput(f"a batch has no option {strange[0]!r}; there are: {known}", param=strange[0])
        metadata, priority = dict(options.get("metadata") or {}), options.get("priority", 5)
        window, in_flight = options.get("window", "24h"), options.get("max_in_flight")
        window_seconds(window)
        check_metadata(metadata)
        _check_length("tenant", tenant := options.get("tenant", DEFAULT_TENANT), _TENANT_CHARACTERS_MAX)
        _check_length("idempotency_key", key := options.get("idempotency_key"), _KEY_CHARACTERS_MAX)
        if not 0 <= priority <= 9:
            raise InvalidInput(f"priority is {priority}; it goes from 0 (first) to 9 (last)", param="priority")
        if in_flight is not None and not 1 <= in_flight <= IN_FLIGHT_MAX:
            raise InvalidInput(f"max_in_flight is {in_flight}; use 1 to {IN_FLIGHT_MAX}", param="max_in_flight")
        values = {
            "tenant": tenant,
            "completion_window": window,
            "metadata": metadata or None,
            "priority": priority,
            "limits": {} if in_flight is None else {"max_in_flight": in_flight},
        }
        defaults = Defaults(check_endpoint(options.get("endpoint")), options.get("model"))
        return cls(defaults, options.get("headers", {}), key, values)


async def submit(part: BatchesPart, file: Path, wanted: Wanted) -> str:
    """Create the batch and return its id. If a batch with this key exists, the file is not stored again."""
    endpoint, sha256 = await asyncio.to_thread(_look_at, file, wanted)
    values = {**wanted.values, "endpoint": endpoint}
    passed_on = CreatorHeaders(part.seal, _select_headers(part, wanted.headers))
    key = idempotency("submit", wanted.idempotency_key, {**values, "sha256": sha256, **passed_on.digest})
    known = await part.batches.find_repeated(NewBatch(input_file_id="", **values, **key))
    if known is not None:
        return known.id
    limit = part.settings.file_bytes_max
    stored = await store_input(part.files, file, tenant=values["tenant"], bytes_max=limit, sha256=sha256)
    return await create_batch(part, passed_on.seal_into(NewBatch(input_file_id=stored.id, **values, **key)))


def _check_length(name: str, value: str | None, most: int) -> None:
    if value is not None and not 1 <= len(value) <= most:
        raise InvalidInput(f"{name} has {len(value)} characters; it must have 1 to {most}", param=name)


def _look_at(file: Path, wanted: Wanted) -> tuple[str, str]:
    """Its endpoint and its checksum. Blocks."""
    return wanted.defaults.endpoint or find_endpoint(file), hash_file(file)


def _select_headers(part: BatchesPart, headers: Mapping[str, str]) -> dict[str, str]:
    """A header that no gateway passes on would be dropped, so it is refused."""
    known = part.core.settings.passthrough_headers
    if strange := sorted({name.lower() for name in headers} - known):
        listed = ", ".join(sorted(known)) or "there is none"
        raise InvalidInput(
            f"the header {strange[0]!r} is not in passthrough_headers of any gateway ({listed}); add it there",
            param="headers",
        )
    return headers_of_creator(headers.items(), known)


async def create_batch(part: BatchesPart, new: NewBatch) -> str:
    with tracing.span("create-batch") as creating:
        new = dataclasses.replace(new, traceparent=creating.traceparent)
        batch, _ = await create(part.batches, part.core.catalog, new, must_be_served=False)
    part.core.doorbell.ring([batch.queue])
    return batch.id


async def require_workers(part: BatchesPart) -> None:
    """Refuse a batch that no worker would run, because no gateway is configured here or in any worker so far.

    Call this before the requests are read: that may take long, and an iterable can be read only once.
    """
    if not part.core.settings.has_gateways and not await is_served(part.core.catalog):
        raise ConfigurationError(f"no worker runs batches: {NO_GATEWAY}\nand start: batchwright up")
