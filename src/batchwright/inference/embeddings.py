"""Texts to vectors: the interface of embedders, and the embedder that uses a model server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batchwright.errors import ConfigurationError, SchemaInvalid
from batchwright.inference.calls import EMBEDDING, Call, InputRefused, Ledger, Refused
from batchwright.inference.gateway import Gateway
from batchwright.inference.sending import CONCURRENCY, Sender, run_all
from batchwright.inference.tokens import estimate_tokens
from batchwright.inference.vectors import URL, dimensions_of, embedding_body, parse_embeddings, read_vectors

_VERSION = 1
_DIMENSIONS_GUESS = 4096
_NUMBER_BYTES_GUESS = 24
"""Size of one number in an answer, written in decimals."""
_HOPELESS = 8
"""If this many inputs are refused one by one, and none accepted, the fault is not in the inputs."""


class Embedder(Protocol):
    """Turns texts into vectors: float32, little-endian, of length 1."""

    @property
    def fingerprint(self) -> str:
        """Name, model, dimensions and version: equal fingerprints give equal vectors."""

    @property
    def model(self) -> str | None:
        """None for a local one, which costs nothing."""

    @property
    def dimensions(self) -> int | None:
        """None until known."""

    @property
    def tokens_max(self) -> int:
        """Maximum number of tokens of one text."""

    async def embed(self, texts: Mapping[bytes, str], ledger: Ledger) -> None:
        """Settle a vector for each text under its key. On an error, settle what is possible, then raise."""

    async def embed_query(self, text: str) -> bytes:
        """The vector of a search query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """What one request may hold; the defaults are OpenAI's."""

    inputs: int = 2048
    tokens_per_input: int = 8192
    tokens: int = 300_000
    """Tokens of all inputs together."""
    answer_bytes: int = 12 * 1024 * 1024
    """Size of the vectors in one answer; must stay below the gateway's limit for answers (`response_bytes_max`)."""

    def __post_init__(self) -> None:
        if min(self.inputs, self.tokens_per_input, self.tokens, self.answer_bytes) < 1:
            raise ConfigurationError(f"a limit of {self} is below 1")


class RemoteEmbedder:
    """Packs many texts into one request to an OpenAI-compatible server."""

    def __init__(
        self,
        gateway: Gateway | None,
        model: str,
        *,
        dimensions: int | None = None,
        limits: PackLimits | None = None,
        concurrency: int = CONCURRENCY,
        is_base64: bool = True,
    ) -> None:
        self.dimensions = dimensions
        self.fingerprint = f"remote:{_VERSION}:{model}:{dimensions or 'own'}"
        self.model = model
        self.asked_dimensions = dimensions
        self._bytes_each = _NUMBER_BYTES_GUESS
        self._is_base64 = is_base64
        self._limits = limits or PackLimits()
        self._sender = Sender(gateway, concurrency=concurrency)
        self.tokens_max = self._limits.tokens_per_input

    async def embed(self, texts: Mapping[bytes, str], ledger: Ledger) -> None:
        work = _Work(self, texts, ledger)
        packs = (partial(work.send, pack) for pack in self._packs(texts))
        try:
            await run_all(packs, concurrency=self._sender.concurrency)
        except SchemaInvalid:
            if work.refused:
                raise work.refusal() from None
            raise

    async def embed_query(self, text: str) -> bytes:
        while True:
            is_base64 = self._is_base64
            try:
                answer = await self._sender.ask(URL, self._body([text], is_base64))
            except Refused as error:
                if not self._stop_base64(error, is_base64):
                    raise
            else:
                (vector,) = parse_embeddings(answer, 1)
                self.learn(vector)
                return vector

    async def pay(self, texts: Mapping[bytes, str], ledger: Ledger) -> list[bytes]:
        """Send one request for all these texts; returns the keys whose vectors have no direction."""
        tokens = [estimate_tokens(text) for text in texts.values()]
        call = Call(kind=EMBEDDING, model=self.model, keys=tuple(texts), tokens_each=tokens, tokens_guess=sum(tokens))
        usable: dict[bytes, bytes] = {}

        def read(body: bytes) -> Mapping[bytes, bytes]:
            for key, vector in zip(call.keys, read_vectors(body, len(call.keys)), strict=True):
                if vector is not None:
                    self.learn(vector)
                    usable[key] = vector
            self._bytes_each = 1 + len(body) // (len(call.keys) * (self.dimensions or 1))
            return usable

        is_base64 = self._is_base64
        try:
            await self._sender.pay(call, URL, self._body(list(texts.values()), is_base64), read, ledger)
        except Refused as error:
            if not self._stop_base64(error, is_base64):
                raise
            return await self.pay(texts, ledger)
        return [key for key in texts if key not in usable]

    def _stop_base64(self, error: Refused, was_asked: bool) -> bool:
        """If the server refused base64, stop asking for it; returns whether the same request may work without it."""
        if not was_asked or error.param != "encoding_format":
            return False
        self._is_base64 = False
        return True

    def _body(self, texts: Sequence[str], is_base64: bool) -> Mapping[str, object]:
        return embedding_body(self.model, texts, self.asked_dimensions, is_base64=is_base64)

    def learn(self, vector: bytes) -> None:
        """Note the model's number of dimensions; raises SchemaInvalid for a vector with another number."""
        found = dimensions_of(vector)
        if self.dimensions is None:
            self.dimensions = found
        elif found != self.dimensions:
            message = f"the model {self.model} returned {found} dimensions instead of {self.dimensions}"
            raise SchemaInvalid(message, code="wrong_dimensions")

    def _packs(self, texts: Mapping[bytes, str]) -> Iterator[dict[bytes, str]]:
        """Groups of as many texts as a request may hold. A text that exceeds the limit by itself is sent alone."""
        pack: dict[bytes, str] = {}
        tokens = 0
        for key, text in texts.items():
            more = estimate_tokens(text)
            if pack and (len(pack) >= self._inputs_max() or tokens + more > self._limits.tokens):
                yield pack
                pack, tokens = {}, 0
            pack[key] = text
            tokens += more
        if pack:
            yield pack

    def _inputs_max(self) -> int:
        """Fewer texts until the length of a vector is known, because an answer that is cut off is paid for anyway."""
        bytes_each = (self.dimensions or _DIMENSIONS_GUESS) * self._bytes_each
        return max(1, min(self._limits.inputs, self._limits.answer_bytes // bytes_each))


class _Work:
    """The texts of one `embed`, of which some may be refused."""

    def __init__(self, embedder: RemoteEmbedder, texts: Mapping[bytes, str], ledger: Ledger) -> None:
        self.refused: dict[bytes, str] = {}
        self._count = len(texts)
        self._embedder = embedder
        self._ledger = ledger
        self._is_any_taken = False

    async def send(self, texts: Mapping[bytes, str]) -> None:
        """Send a pack. Split a refused pack in halves, until a faulty text is alone."""
        try:
            unusable = await self._embedder.pay(texts, self._ledger)
            self._is_any_taken = True
            self.refused |= dict.fromkeys(unusable, "invalid_vector")
        except Refused as error:
            await self._send_halves(texts, error)
        if self.refused.keys() & texts.keys():
            raise self.refusal()

    async def _send_halves(self, texts: Mapping[bytes, str], error: Refused) -> None:
        if len(texts) == 1:
            self.refused |= dict.fromkeys(texts, error.code or "refused")
        elif self._is_hopeless(error):
            raise error
        else:
            keys = list(texts)
            halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            jobs = [partial(self.send, {key: texts[key] for key in half}) for half in halves]
            await run_all(jobs, concurrency=1)

    def _is_hopeless(self, error: Refused) -> bool:
        """Whether no text is at fault: the server names another field, or refuses many texts and accepts none."""
        is_other = error.param is not None and not error.param.startswith("input")
        return is_other or (len(self.refused) >= _HOPELESS and not self._is_any_taken)

    def refusal(self) -> InputRefused:
        return InputRefused(self._embedder.model, self.refused, count=self._count)
