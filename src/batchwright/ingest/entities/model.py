"""Entities by a model on an OpenAI-compatible server: one window for each request, under a schema."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from batchwright.errors import ConfigurationError, SchemaInvalid
from batchwright.inference.calls import ENTITIES, Call, InputRefused, Ledger, Refused
from batchwright.inference.gateway import Gateway
from batchwright.inference.sending import CONCURRENCY, Sender, run_all
from batchwright.inference.tokens import estimate_tokens
from batchwright.ingest.entities.bodies import ANSWER_TOKENS, URL, entity_body, find_entities
from batchwright.ingest.entities.mention import dump_mentions

TYPES = ("person", "organization", "location", "product", "event")
_VERSION = 1
_OPTIONAL = frozenset({"temperature", "max_completion_tokens"})
"""Fields that some servers refuse, and that a request can do without."""


class ModelExtractor:
    """Requests the entities of each window from a model."""

    def __init__(
        self,
        gateway: Gateway | None,
        model: str,
        *,
        types: Sequence[str] = TYPES,
        answer_tokens: int = ANSWER_TOKENS,
        concurrency: int = CONCURRENCY,
    ) -> None:
        if not types or len(set(types)) < len(types) or not all(types):
            raise ConfigurationError(f"types is {list(types)}; name at least one type of entity, without duplicates")
        self.dropped = 0
        """Number of texts since the start that the model named, but that were not in the window."""
        self.model = model
        self.answer_tokens = answer_tokens
        self._left_out: frozenset[str] = frozenset()
        self._sender = Sender(gateway, concurrency=concurrency)
        self.types = tuple(types)
        question = orjson.dumps(entity_body(model, self.types, "", answer_tokens=answer_tokens))
        self.question_tokens = estimate_tokens(question.decode())
        self.fingerprint = f"model:{_VERSION}:{model}:{hashlib.sha256(question).hexdigest()[:16]}"

    async def extract(self, windows: Mapping[bytes, str], ledger: Ledger) -> None:
        failed: dict[bytes, str] = {}
        jobs = (partial(self._extract_one, key, window, ledger, failed) for key, window in windows.items())
        try:
            await run_all(jobs, concurrency=self._sender.concurrency)
        except SchemaInvalid:
            raise InputRefused(self.model, failed, count=len(windows)) from None

    async def _extract_one(self, key: bytes, window: str, ledger: Ledger, failed: dict[bytes, str]) -> None:
        try:
            await self._pay(key, window, ledger)
        except SchemaInvalid as error:
            failed[key] = error.code or error.kind
            raise

    async def _pay(self, key: bytes, window: str, ledger: Ledger) -> None:
        tokens = self.question_tokens + estimate_tokens(window)
        call = Call(
            kind=ENTITIES,
            model=self.model,
            keys=(key,),
            tokens_each=(tokens,),
            tokens_guess=tokens + self.answer_tokens,
        )

        def read(body: bytes) -> Mapping[bytes, bytes]:
            found = find_entities(body, window, types=self.types)
            self.dropped += found.dropped
            return {key: dump_mentions(found.mentions)}

        body = self._body(window)
        try:
            await self._sender.pay(call, URL, body, read, ledger)
        except Refused as error:
            if error.param not in _OPTIONAL & body.keys():
                raise
            self._left_out |= {error.param}
            await self._pay(key, window, ledger)

    def _body(self, window: str) -> Mapping[str, Any]:
        body = entity_body(self.model, self.types, window, answer_tokens=self.answer_tokens)
        return {name: value for name, value in body.items() if name not in self._left_out}
