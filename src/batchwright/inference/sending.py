"""Sends paid calls: each is begun, sent once and settled. Many run at a time; one error does not stop the others."""

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
"""After this many failures the server counts as unavailable, and unsent calls wait for the next attempt."""

Read = Callable[[bytes], Mapping[bytes, bytes]]
"""The values by key in the body of an answer; raises SchemaInvalid if the answer is unusable."""


class Sender:
    """Sends the calls of one embedder or extractor to its server, with one limit of concurrent calls for all users."""

    def __init__(self, gateway: Gateway | None, *, concurrency: int = CONCURRENCY) -> None:
        """Without a gateway nothing can be sent: then only a provider's batch API has the model."""
        self.concurrency = concurrency
        self._gateway = gateway
        self._turns = asyncio.Semaphore(concurrency)

    async def pay(self, call: Call, url: str, body: Mapping[str, Any], read: Read, ledger: Ledger) -> None:
        """Run one call from intent to settlement. Records a failure first, then raises it."""
        request = Request(url=url, body=_encode(body), id=call.id)
        gateway = self._require_gateway(call.model)
        async with self._turns:
            await ledger.begin(call)
            answer = await gateway.send(request)
        try:
            values = await _values_in(answer, call, read)
        except OperationError as error:
            await _write_even_if_cancelled(ledger.fail(call, error, answer))
            raise
        await _write_even_if_cancelled(ledger.settle(call, values, answer.usage, answer))

    async def ask(self, url: str, body: Mapping[str, Any]) -> bytes:
        """Send a request whose answer is not stored, such as for a search query."""
        gateway = self._require_gateway(body.get("model"))
        answer = await gateway.send(Request(url=url, body=_encode(body), id=new_call_id()))
        if (error := error_of(answer, inputs=1)) is not None:
            raise error
        return answer.body

    def _require_gateway(self, model: str | None) -> Gateway:
        if self._gateway is None:
            raise ConfigurationError(
                f"only a provider's batch API serves the model {model!r}, and it answers hours later; for immediate "
                "answers configure a server for it"
            )
        return self._gateway


async def run_all(jobs: Iterable[Callable[[], Awaitable[None]]], *, concurrency: int) -> None:
    """Run all jobs to their end, a limited number at a time, and then raise the worst error.

    An error of one job cancels no other. But after an error that every job would get, no further job starts.
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
    """Run work in a thread of this process, in batches that are settled one by one.

    Callers take turns: many threads at once would starve the event loop.
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
    """Long answers are parsed in a thread, so that they do not block the loop."""
    if (error := error_of(answer, inputs=len(call.keys))) is not None:
        raise error
    if len(answer.body) <= _IN_LOOP_BYTES_MAX:
        return read(answer.body)
    return await asyncio.to_thread(read, answer.body)


async def _write_even_if_cancelled(writing: Coroutine[Any, Any, None]) -> None:
    """Record what has been paid for, even if the work is cancelled now."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_SETTLE_SECONDS)
        if task.done() and not task.cancelled():
            task.exception()  # read it to avoid a warning about an unread exception: the cancellation counts
        task.cancel()
        raise
