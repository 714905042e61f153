"""Sending paid calls: each begun, sent once and settled; many at a time, and none given up for another's error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import orjson

from batchwright.engine.policy import classify
from batchwright.errors import (
    ConfigurationError,
    Fatal,
    OperationError,
    RateLimited,
    RetryLater,
    SchemaInvalid,
    Transient,
)
from batchwright.inference.answers import Answer
from batchwright.inference.calls import Call, Ledger, error_of, local_answer, new_call_id
from batchwright.inference.gateway import Gateway, Request
from batchwright.inference.tokens import estimate_tokens

CONCURRENCY = 8
_BATCH = 256
_IN_LOOP_BYTES_MAX = 128 * 1024
_SETTLE_SECONDS = 10.0
_TRANSIENT_MAX = 3
"""After so many the server is taken to be away, and what is not sent yet waits for the next attempt."""

Read = Callable[[bytes], Mapping[bytes, bytes]]
"""The values by key in the body of an answer; raises SchemaInvalid for one that is of no use."""


class Sender:
    """Sends the calls of one embedder or extractor to its server, so many at a time over all who use it."""

    def __init__(self, gateway: Gateway | None, *, concurrency: int = CONCURRENCY) -> None:
        """Without a gateway nothing can be sent: only a provider's batch API has the model."""
        self.concurrency = concurrency
        self._gateway = gateway
        self._turns = asyncio.Semaphore(concurrency)

    async def pay(self, call: Call, url: str, body: Mapping[str, Any], read: Read, ledger: Ledger) -> None:
        """One call from intent to settlement; raises why there is nothing to keep, after it was written down."""
        request = Request(url=url, body=_encode(body), id=call.id)
        gateway = self._require_gateway(call.model)
        async with self._turns:
            await ledger.begin(call)
            answer = await gateway.send(request)
        try:
            values = await _values_in(answer, call, read)
        except OperationError as error:
            await _see_through(ledger.fail(call, error, answer))
            raise
        await _see_through(ledger.settle(call, values, answer.usage, answer))

    async def ask(self, url: str, body: Mapping[str, Any]) -> bytes:
        """A request that nobody keeps, such as for the words of a search."""
        gateway = self._require_gateway(body.get("model"))
        answer = await gateway.send(Request(url=url, body=_encode(body), id=new_call_id()))
        if (error := error_of(answer, inputs=1)) is not None:
            raise error
        return answer.body

    def _require_gateway(self, model: str | None) -> Gateway:
        if self._gateway is None:
            raise ConfigurationError(
                f"only a provider's batch API has the model {model!r} here, which answers hours later; for answers at "
                "once configure a server for it"
            )
        return self._gateway


async def run_all(jobs: Iterable[Callable[[], Awaitable[None]]], *, concurrency: int) -> None:
    """Run all to their end, so many at a time, and then raise the worst error.

    No job is cancelled for another's error. Those not yet started stay undone when going on is of no use: after an
    error that all would meet.
    """
    waiting, errors = iter(jobs), list[Exception]()

    async def work() -> None:
        for job in waiting:
            if _is_hopeless(errors):
                return
            try:
                await job()
            except Exception as error:
                errors.append(error)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    if errors:
        raise max(errors, key=lambda error: (_badness(error), getattr(error, "retry_after", None) or 0.0))


async def settle_here(
    kind: str,
    texts: Mapping[bytes, str],
    work: Callable[[Sequence[str]], Sequence[bytes]],
    ledger: Ledger,
    turns: asyncio.Semaphore,
) -> None:
    """Work that is done in this process, in a thread and in batches of which each is settled by itself.

    Those who work here take turns: many threads at once would leave the event loop too little of the interpreter.
    """
    keys = list(texts)
    for start in range(0, len(keys), _BATCH):
        batch = {key: texts[key] for key in keys[start : start + _BATCH]}
        tokens = [estimate_tokens(text) for text in batch.values()]
        call = Call(kind=kind, model=None, keys=tuple(batch), tokens_each=tokens, tokens_guess=0)
        await ledger.begin(call)
        async with turns:
            started = time.monotonic()
            values = await asyncio.to_thread(work, list(batch.values()))
        answer = local_answer(time.monotonic() - started)
        await ledger.settle(call, dict(zip(batch, values, strict=True)), answer.usage, answer)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        raise SchemaInvalid("a text holds half a character and cannot be sent as UTF-8", code="invalid_text") from None


def _is_hopeless(errors: Sequence[Exception]) -> bool:
    kinds = [classify(error) for error in errors]
    if any(isinstance(kind, (RateLimited, RetryLater)) for kind in kinds):
        return True
    if any(isinstance(kind, Fatal) and kind.scope != "item" for kind in kinds):
        return True
    return sum(isinstance(kind, Transient) for kind in kinds) >= _TRANSIENT_MAX


def _badness(error: Exception) -> int:
    match classify(error):
        case Fatal():
            return 3
        case SchemaInvalid():
            return 2
        case Transient():
            return 1
        case _:
            return 0


async def _values_in(answer: Answer, call: Call, read: Read) -> Mapping[bytes, bytes]:
    """Long answers are read in a thread, which lets the loop go on meanwhile."""
    if (error := error_of(answer, inputs=len(call.keys))) is not None:
        raise error
    if len(answer.body) <= _IN_LOOP_BYTES_MAX:
        return read(answer.body)
    return await asyncio.to_thread(read, answer.body)


async def _see_through(writing: Coroutine[Any, Any, None]) -> None:
    """What has been paid for is written down, even if the work is cancelled now."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_SETTLE_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # read, so that nobody complains: the cancellation counts
        task.cancel()
        raise
