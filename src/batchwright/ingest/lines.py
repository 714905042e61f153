"""The lines of a batch for documents: their requests, and how to read their answers. Nothing here sends or stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from batchwright.errors import Fatal, OperationError, RateLimited, SchemaInvalid, Transient
from batchwright.inference.answers import Answer, Reply, Usage, classify
from batchwright.inference.calls import EMBEDDING, ENTITIES, Refused, error_of
from batchwright.inference.embeddings import RemoteEmbedder
from batchwright.inference.tokens import estimate_tokens
from batchwright.inference.vectors import URL as EMBEDDINGS_URL
from batchwright.inference.vectors import embedding_body, read_vectors
from batchwright.ingest.entities.bodies import URL as CHAT_URL
from batchwright.ingest.entities.bodies import entity_body, find_entities
from batchwright.ingest.entities.mention import dump_mentions
from batchwright.ingest.entities.model import ModelExtractor
from batchwright.jsonl import one_line

FAILURES_MAX = 3
"""Maximum number of temporary failures of a request; after that its document gets the error."""
_INPUTS_MAX = 100
_TOKENS_MAX = 100_000
_SMALLER = 10
"""A refused line is resent in lines of a tenth of its size: halving would take many more batches, each of hours."""
_MONEY = Decimal("1e-12")
_LINE = "line-"


class Ask(Protocol):
    """How requests to one model are put into batches."""

    kind: str
    model: str
    fingerprint: str
    url: str
    inputs_max: int
    answer_tokens: int
    optional: frozenset[str]
    """Fields that some servers refuse, and that a request can do without."""

    def tokens(self, text: str) -> int: ...

    def body(self, texts: Sequence[str], left_out: frozenset[str]) -> dict[str, Any]: ...

    def read(self, body: bytes, texts: Sequence[str]) -> list[bytes | None]:
        """A value for each text, None if it is unusable. Raises SchemaInvalid if the whole answer is unusable."""


class EmbeddingAsk:
    """Many texts in one line."""

    kind = EMBEDDING
    url = EMBEDDINGS_URL
    inputs_max = _INPUTS_MAX
    answer_tokens = 0
    optional = frozenset({"encoding_format"})

    def __init__(self, embedder: RemoteEmbedder) -> None:
        self.model = embedder.model
        self.fingerprint = embedder.fingerprint
        self._embedder = embedder

    def tokens(self, text: str) -> int:
        return estimate_tokens(text)

    def body(self, texts: Sequence[str], left_out: frozenset[str]) -> dict[str, Any]:
        is_base64 = "encoding_format" not in left_out
        return embedding_body(self.model, texts, self._embedder.asked_dimensions, is_base64=is_base64)

    def read(self, body: bytes, texts: Sequence[str]) -> list[bytes | None]:
        vectors = read_vectors(body, len(texts))
        for vector in vectors:
            if vector is not None:
                self._embedder.learn(vector)
        return vectors


class EntityAsk:
    """One window in each line."""

    kind = ENTITIES
    url = CHAT_URL
    inputs_max = 1
    optional = frozenset({"temperature", "max_completion_tokens"})

    def __init__(self, extractor: ModelExtractor) -> None:
        self.answer_tokens = extractor.answer_tokens
        self.model = extractor.model
        self.fingerprint = extractor.fingerprint
        self._extractor = extractor

    def tokens(self, text: str) -> int:
        return self._extractor.question_tokens + estimate_tokens(text)

    def body(self, texts: Sequence[str], left_out: frozenset[str]) -> dict[str, Any]:
        body = entity_body(self.model, self._extractor.types, texts[0], answer_tokens=self.answer_tokens)
        return {name: value for name, value in body.items() if name not in left_out}

    def read(self, body: bytes, texts: Sequence[str]) -> list[bytes | None]:
        found = find_entities(body, texts[0], types=self._extractor.types)
        self._extractor.dropped += found.dropped
        return [dump_mentions(found.mentions)]


def ask_of(model: Any) -> Ask:
    """The form of batch requests for an embedder or an extractor."""
    return EmbeddingAsk(model) if isinstance(model, RemoteEmbedder) else EntityAsk(model)


# Before sending ------------------------------------------------------------------------------------------------------


class Unsent(NamedTuple):
    """A request that is in no batch yet."""

    hash: bytes
    tokens: int
    bytes: int
    pack: int | None
    left_out: str


def pack(unsent: Sequence[Unsent], inputs_max: int, bytes_max: int) -> list[list[Unsent]]:
    """Lines for one batch, in the order of the rows. Rows that do not fit are left for the next batch."""
    lines: list[list[Unsent]] = []
    tokens = size = 0
    for one in unsent:
        more = 2 * one.bytes + 64  # quotes and line breaks take two bytes in JSON
        last = lines[-1] if lines else None
        is_like = last is not None and (last[0].pack, last[0].left_out) == (one.pack, one.left_out)
        fits = (
            is_like and len(last or ()) < min(inputs_max, one.pack or inputs_max) and tokens + one.tokens <= _TOKENS_MAX
        )
        more += 0 if fits else 4096
        if lines and size + more > bytes_max:
            break
        if fits and last is not None:
            last.append(one)
            tokens += one.tokens
        else:
            lines.append([one])
            tokens = one.tokens
        size += more
    return lines


def line_bytes(ask: Ask, number: int, texts: Sequence[str], left_out: str) -> bytes:
    """The line as bytes. Equal rows give equal bytes."""
    body = ask.body(texts, frozenset(filter(None, left_out.split(","))))
    line = {"custom_id": f"{_LINE}{number}", "method": "POST", "url": ask.url, "body": body}
    return one_line(orjson.dumps(line)) + b"\n"


# After sending --------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A request in a batch."""

    line: int
    hash: bytes
    item_id: str
    input: str
    tokens: int
    failures: int
    left_out: str


class Back(NamedTuple):
    """A request that leaves its batch without an answer: it is resent, or has an error."""

    hash: bytes
    failures: int
    pack: int | None
    left_out: str
    error: dict[str, Any] | None


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw
    request_id: str | None = None


class _Error(msgspec.Struct):
    code: str
    status_code: int | None = None
    body: msgspec.Raw | None = None


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Line).decode


def read_line(line: bytes) -> tuple[int, Answer]:
    """The number and answer of a line of an output or error file. Raises ValueError if the line is not ours."""
    found = _decode(line)
    if not found.custom_id.startswith(_LINE):
        raise ValueError(f"a line of a batch has the custom_id {found.custom_id[:40]!r}")
    number = int(found.custom_id.removeprefix(_LINE))
    if found.response is not None:
        said = found.response
        reply = Reply(status=said.status_code, body=bytes(said.body), request_id=said.request_id)
        return number, classify(reply, now=0.0)
    error = found.error or _Error(code="no_answer")
    return number, unanswered(error.code, error.status_code, b"" if error.body is None else bytes(error.body))


def unanswered(code: str, status: int | None = None, body: bytes = b"") -> Answer:
    """The answer for a line that the server did not answer, with our own code."""
    answer = classify(Reply(status=status, body=body), now=0.0)
    return msgspec.structs.replace(answer, code=code, succeeded=False)


@dataclass(slots=True, kw_only=True)
class Settled:
    """The result of one line."""

    line: int
    rows: Sequence[Sent]
    usage: Usage
    values: dict[bytes, bytes] = field(default_factory=dict)
    back: list[Back] = field(default_factory=list)
    error: OperationError | None = None
    is_answered: bool = True
    """Whether a server has seen the line. A line that was never sent gets no event of its own."""
    is_paid: bool = False
    credential: str | None = None
    """Problem with a credential: no request can succeed until a user has corrected it."""
    refused_field: str | None = None
    """A field that the server does not know; requests can do without it."""


def settle_line(ask: Ask, rows: Sequence[Sent], answer: Answer) -> Settled:
    """Read the answer to a line. Its rows get their values, are put back, or get an error."""
    settled = Settled(
        line=rows[0].line,
        rows=rows,
        usage=answer.usage,
        is_answered=answer.status is not None,
        is_paid=answer.succeeded,
    )
    settled.error = error_of(answer, inputs=len(rows))
    if settled.error is not None:
        _put_back(ask, settled, settled.error)
        return settled
    try:
        values = ask.read(answer.body, [row.input for row in rows])
    except SchemaInvalid as error:
        settled.error = error
        settled.back = [_failed(row, error) for row in rows]
        return settled
    for row, value in zip(rows, values, strict=True):
        if value is not None:
            settled.values[row.hash] = value
        else:
            unusable = SchemaInvalid("the vector is zero or not finite", code="invalid_vector")
            settled.back.append(_failed(row, unusable))
    return settled


def _put_back(ask: Ask, settled: Settled, error: OperationError) -> None:
    rows = settled.rows
    match error:
        case Fatal(scope="credential"):
            settled.credential = str(error)
            settled.back = [_resend(row, row.failures) for row in rows]
        case Transient() | RateLimited():
            is_over = [row.failures + 1 >= FAILURES_MAX for row in rows]
            settled.back = [
                _failed(row, error) if over else _resend(row, row.failures + 1)
                for row, over in zip(rows, is_over, strict=True)
            ]
        case Refused(param=str() as param) if param in ask.optional and param not in rows[0].left_out.split(","):
            settled.refused_field = param
            left_out = join_fields(rows[0].left_out, param)
            settled.back = [_resend(row, row.failures)._replace(left_out=left_out) for row in rows]
        case Refused() if len(rows) > 1 and (error.param is None or error.param.startswith("input")):
            smaller = max(1, len(rows) // _SMALLER)
            settled.back = [_resend(row, row.failures)._replace(pack=smaller) for row in rows]
        case _:
            settled.back = [_failed(row, error) for row in rows]


def join_fields(left_out: str, *more: str) -> str:
    return ",".join(sorted({*filter(None, left_out.split(",")), *more}))


def _resend(row: Sent, failures: int) -> Back:
    return Back(row.hash, failures, None, row.left_out, None)


def _failed(row: Sent, error: OperationError) -> Back:
    shown = {"kind": type(error).__name__ if not isinstance(error, Refused) else "SchemaInvalid"}
    shown |= {"code": error.code or error.kind, "message": str(error)}
    return Back(row.hash, row.failures + 1, None, row.left_out, shown)


def share_money(cost: Decimal, weights: Sequence[int]) -> list[Decimal]:
    """Parts in proportion to the weights, whose sum is exactly the cost."""
    if not sum(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    ends = [(cost * end / whole).quantize(_MONEY) for end in accumulate(weights)]
    ends[-1] = cost
    return [end - start for start, end in pairwise([Decimal(0), *ends])]


def split_lines(pieces: Sequence[bytes], rest: bytes) -> tuple[list[bytes], bytes]:
    """Complete lines, and the beginning of the next one."""
    *whole, rest = (rest + b"".join(pieces)).split(b"\n")
    return [line for line in whole if line], rest


def error_from(shown: Mapping[str, Any]) -> OperationError:
    """The error as it was when the batch was collected."""
    kinds: dict[str, type[OperationError]] = {"Transient": Transient, "RateLimited": Transient, "Fatal": Fatal}
    kind = kinds.get(str(shown.get("kind")), SchemaInvalid)
    message, code = str(shown.get("message")), shown.get("code")
    return Fatal(message, scope="item", code=code) if kind is Fatal else kind(message, code=code)


def numbered(lines: Sequence[Sequence[Unsent]]) -> Iterator[tuple[Unsent, int, int]]:
    """Each request with its line and its place there."""
    for line, rows in enumerate(lines):
        for place, row in enumerate(rows):
            yield row, line, place
