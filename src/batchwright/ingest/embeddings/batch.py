"""One batch: read its rows, request the missing vectors, and store a part of the result."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.engine.context import Context
from batchwright.engine.owned import Held
from batchwright.errors import RetryLater, Transient
from batchwright.inference.calls import InputRefused
from batchwright.inference.embeddings import Embedder
from batchwright.ingest.embeddings.ledger import BatchLedger, Bill
from batchwright.ingest.embeddings.parts import Part, encode_errors, encode_rows, part_key
from batchwright.ingest.embeddings.payloads import EmbedBatch
from batchwright.ingest.embeddings.rows import CHARACTERS_PER_TOKEN_MAX, TOO_LONG, BadRow, GoodRow, Row
from batchwright.ingest.embeddings.toolbox import Toolbox

_TEXT_CHARACTERS_AT_ONCE = 8_000_000
_OTHER_WORKER_SECONDS = 60.0


class BatchRunner:
    """Runs batches in one worker process."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools

    async def run(self, ctx: Context, batch: EmbedBatch) -> dict[str, Any]:
        embedder = self._tools.embedder(batch.request)
        if embedder.fingerprint != batch.fingerprint:
            raise RetryLater(
                f"this worker has {embedder.fingerprint}, but the job started with {batch.fingerprint}; install the "
                "same version on all workers",
                _OTHER_WORKER_SECONDS,
            )
        ledger = self._ledger(ctx, embedder)
        if ctx.claim > 1:
            await ledger.end_older()
        reader = await self._tools.reader(batch.request, ctx.tenant, also_gone=True)
        made = _Made()
        async for rows in _gathered(reader.read(batch.piece)):
            await self._embed(rows, embedder, ledger, made)
        bill = Bill() if embedder.model is None else await ledger.bill()
        return (await self._store(ctx, batch, made, bill)).document()

    def _ledger(self, ctx: Context, embedder: Embedder) -> BatchLedger:
        return BatchLedger(
            queue=self._tools.queue,
            held=Held(ctx.job_id, ctx.claim, ctx.worker),
            tenant=ctx.tenant,
            fingerprint=embedder.fingerprint,
            price=self._tools.price(embedder.model),
            rates=self._tools.rates,
        )

    async def _embed(self, rows: Sequence[Row], embedder: Embedder, ledger: BatchLedger, made: _Made) -> None:
        """Vectors for these rows; texts that the model refuses, and only those, become bad rows."""
        judged = [_judge(row, embedder) for row in rows]
        texts = {_hash(row.text): row.text for row in judged if isinstance(row, GoodRow)}
        known = await self._known(embedder, ledger, texts)
        missing = {key: text for key, text in texts.items() if key not in known}
        refused: Mapping[bytes, str] = {}
        if missing:
            made.asked += len(missing)
            try:
                await embedder.embed(missing, ledger)
            except InputRefused as error:
                refused = error.codes
            known |= ledger.values
            if embedder.model is not None:
                # Another batch may have stored a vector for the same text first: all batches use the stored one.
                known |= await self._known(embedder, ledger, missing)
        ledger.values.clear()
        for row in judged:
            made.add(row if isinstance(row, BadRow) else _with_refusal(row, refused), known)

    async def _known(self, embedder: Embedder, ledger: BatchLedger, texts: Mapping[bytes, str]) -> dict[bytes, bytes]:
        if embedder.model is None or not texts:
            return {}
        answers = self._tools.answers
        known = await answers.find(ledger.tenant, ledger.fingerprint, texts)
        if known:
            await answers.touch(ledger.tenant, ledger.fingerprint, known)
        return known

    async def _store(self, ctx: Context, batch: EmbedBatch, made: _Made, bill: Bill) -> Part:
        key = errors_key = None
        if made.vectors:
            data = await asyncio.to_thread(encode_rows, batch.request.output, made.ids, made.vectors)
            key = part_key(batch.parent, batch.number, ctx.claim, "rows")
            await self._tools.store.put(key, data)
        if made.bad:
            errors_key = part_key(batch.parent, batch.number, ctx.claim, "errors")
            await self._tools.store.put(errors_key, encode_errors(made.bad))
        return Part(
            rows=len(made.ids),
            failed=len(made.bad),
            key=key,
            errors_key=errors_key,
            dimensions=len(made.vectors[0]) // 4 if made.vectors else None,
            has_text_ids=any(isinstance(id, str) for id in made.ids),
            asked=made.asked,
            calls=bill.calls,
            tokens=bill.prompt_tokens,
            in_doubt=bill.in_doubt,
            cost=None if bill.cost is None else str(bill.cost),
            codes=dict(Counter(row.code for row in made.bad)),
            first_error=made.bad[0].document() if made.bad else None,
        )


@dataclass(slots=True)
class _Made:
    """The results of the rows so far, in their order."""

    ids: list[Any] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    asked: int = 0

    def add(self, row: Row, known: Mapping[bytes, bytes]) -> None:
        if isinstance(row, BadRow):
            self.bad.append(row)
            return
        vector = known.get(_hash(row.text))
        if vector is None:
            raise Transient("a stored vector is gone", code="vector_gone")
        self.ids.append(row.id)
        self.vectors.append(vector)


async def _gathered(rows: AsyncIterator[Row]) -> AsyncIterator[list[Row]]:
    """Groups of rows whose texts take little memory."""
    found: list[Row] = []
    characters = 0
    async for row in rows:
        found.append(row)
        characters += len(row.text) if isinstance(row, GoodRow) else 0
        if characters >= _TEXT_CHARACTERS_AT_ONCE:
            yield found
            found, characters = [], 0
    if found:
        yield found


def _judge(row: Row, embedder: Embedder) -> Row:
    if isinstance(row, BadRow) or len(row.text) <= embedder.tokens_max * CHARACTERS_PER_TOKEN_MAX:
        return row
    message = f"the text has {len(row.text):,} characters; the model accepts {embedder.tokens_max:,} tokens"
    return BadRow(TOO_LONG, message, row.id, row.number)


def _with_refusal(row: GoodRow, refused: Mapping[bytes, str]) -> Row:
    code = refused.get(_hash(row.text))
    return row if code is None else BadRow(code, "the model server refused the text", row.id, row.number)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
