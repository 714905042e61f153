"""The available models: those with their own gateway, those that workers serve, and those that the gateway for all
models lists. That gateway gets at most two requests a minute; while it does not answer, its last answer is used.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from batchwright.batches.store import SHARD_QUEUE, Batches
from batchwright.errors import BatchwrightError, ConfigurationError
from batchwright.inference.settings import GatewaySettings, InferenceSettings

if TYPE_CHECKING:
    from batchwright.inference.gateway import Gateway

log = logging.getLogger(__name__)

KEPT_SECONDS = 30.0
_PAUSE_SECONDS = 5.0
_ANSWER_SECONDS_MAX = 3.0
_MODELS_MAX = 10_000
_OWNER = "batchwright"
_MODELS_NAMED = 10
_UNKNOWN_MODEL = frozenset({"404", "http_404", "model_not_found", "not_found", "notfounderror"})
"""Codes by which servers say that they do not have a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model; its server reports when and by whom it was created."""

    id: str
    created: int = 0
    owned_by: str = _OWNER


class ModelsUnknown(BatchwrightError):
    """The model server has not listed its models yet; the log says why."""


class Models:
    """The models of all gateways."""

    def __init__(
        self, batches: Batches, gateway: GatewaySettings, named: Iterable[str], inference: InferenceSettings
    ) -> None:
        self._batches = batches
        self._settings = gateway
        self._named = [*named]
        self._inference = inference
        self._gateway: Gateway | None = None
        self._asking = asyncio.Lock()
        self._asked_at = -math.inf
        self._pause = 0.0
        self._said: list[Model] | None = None

    async def find(self) -> list[Model]:
        """Sorted by name; ModelsUnknown until the gateway for all models has answered once."""
        served = {queue.removeprefix(SHARD_QUEUE) for queue in await self._batches.served_queues() if _is_plain(queue)}
        known = {id: Model(id=id) for id in (*served, *self._named)}
        if self._settings.is_set:
            known |= {model.id: model for model in await self._ask()}
        return sorted(known.values(), key=lambda model: model.id)

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()

    async def _ask(self) -> list[Model]:
        """One request at a time, for all callers."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= self._pause:
                try:
                    self._said, self._pause = await self._fetch(), KEPT_SECONDS
                except (ConfigurationError, ValueError) as error:
                    self._pause = _PAUSE_SECONDS
                    log.warning("the gateway %s does not list its models: %s", self._settings.endpoint, error)
                self._asked_at = time.monotonic()
            if self._said is None:
                raise ModelsUnknown("The model server did not list its models; see the log of this server.")
            return self._said

    async def _fetch(self) -> list[Model]:
        from batchwright.inference.gateway import Gateway, Request  # here: it loads the HTTP client

        if self._gateway is None:
            self._gateway = Gateway(self._settings, self._inference)
        request = Request(url="/v1/models", body=b"", id=uuid.uuid4().hex)
        reply = await self._gateway.fetch(request, _ANSWER_SECONDS_MAX)
        if reply.status != 200:
            raise ValueError(reply.detail or f"its status is {reply.status}")
        return _parse(orjson.loads(reply.body))


def _is_plain(queue: str) -> bool:
    """Whether the queue is for one model of ordinary batches: not for any model, and not below a private queue."""
    return queue.startswith(SHARD_QUEUE) and queue != SHARD_QUEUE


def _parse(found: Any) -> list[Model]:
    """Fills in fields that some servers leave out; skips entries without a name."""
    match found:
        case {"data": [*data]}:
            pass
        case _:
            raise ValueError("its answer has no list 'data'")
    models = [one for one in data[:_MODELS_MAX] if isinstance(one, dict) and isinstance(one.get("id"), str)]
    return [
        Model(
            id=one["id"],
            created=one["created"] if type(one.get("created")) is int else 0,
            owned_by=one["owned_by"] if isinstance(one.get("owned_by"), str) else _OWNER,
        )
        for one in models
    ]


async def describe_missing(models: Models, wanted: Iterable[str], codes: Iterable[str]) -> str | None:
    """If lines failed because the server does not have their model, the models that it has."""
    if not _UNKNOWN_MODEL.intersection(code.lower() for code in codes):
        return None
    try:
        known = [model.id for model in await models.find()]
    except BatchwrightError:
        return None
    missing = sorted(set(wanted) - set(known))
    if not missing or not known:
        return None
    close = difflib.get_close_matches(missing[0], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f" and {len(known) - _MODELS_NAMED} more" if len(known) > _MODELS_NAMED else ""
    named = ", ".join(known[:_MODELS_NAMED])
    return f"the server has no model {missing[0]!r}; the models that the server has: {named}{more}{hint}"
