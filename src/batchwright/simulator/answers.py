"""The bytes of an answer: in OpenAI's format, with text that depends only on the seed and the prompt."""

from __future__ import annotations

import base64
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import orjson
import xxhash

from batchwright.simulator.bodies import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MODERATIONS,
    OUTPUT_TOKENS_MAX,
    RERANK,
    SCORE,
    Ask,
)
from batchwright.simulator.prefix_cache import tokens
from batchwright.simulator.profiles import Profile
from batchwright.simulator.structured import Form, written

_POOL = 1 << 14
_WORDS = b"all and any are ask bed big but can car cat day did dog eat end few fly for fox get had her him".split()
_NORMAL = NormalDist()

_CHAT = (
    b'{"id":"chatcmpl-%016x","object":"chat.completion","created":%d,"model":%b,"choices":[%b],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0,"audio_tokens":0},'
    b'"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,"accepted_prediction_tokens":0,'
    b'"rejected_prediction_tokens":0}},"service_tier":"default","system_fingerprint":"fp_simulator"}'
)
_CHAT_CHOICE = (
    b'{"index":%d,"message":{"role":"assistant","content":"%b","refusal":null,"annotations":[]},'
    b'"logprobs":null,"finish_reason":"%b"}'
)
_TEXT = (
    b'{"id":"cmpl-%016x","object":"text_completion","created":%d,"model":%b,"choices":[%b],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":%d}},"system_fingerprint":"fp_simulator"}'
)
_TEXT_CHOICE = b'{"index":%d,"text":"%b","logprobs":null,"finish_reason":"%b"}'
_EMBEDDINGS = b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
_EMBEDDING = b'{"object":"embedding","index":%d,"embedding":%b}'
_MODERATIONS = b'{"id":"modr-%016x","model":%b,"results":[%b]}'
_MODERATION = b'{"flagged":false,"categories":{"violence":false},"category_scores":{"violence":0.0001}}'
_SCORES = (
    b'{"id":"score-%016x","object":"list","created":%d,"model":%b,"data":[%b],"usage":{"prompt_tokens":%d,'
    b'"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}'
)
_SCORE = b'{"index":%d,"object":"score","score":%.6f}'
_RERANKING = b'{"id":"rerank-%016x","model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[%b]}'
_RANK = b'{"index":%d,"document":{"text":%b,"multi_modal":null},"relevance_score":%.6f}'
_RESPONSE = (
    b'{"id":"resp_%016x","object":"response","created_at":%d,"status":"%b","background":false,"error":null,'
    b'"incomplete_details":%b,"instructions":null,"max_output_tokens":%b,"model":%b,'
    b'"output":[{"id":"msg_%016x","type":"message","status":"%b","role":"assistant",'
    b'"content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"%b"}]}],'
    b'"parallel_tool_calls":true,"previous_response_id":null,"store":false,"temperature":1.0,"tool_choice":"auto",'
    b'"tools":[],"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":%d,'
    b'"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},"output_tokens":%d,'
    b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d},"metadata":{}}'
)

_REASONS: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "permission_denied"),
    404: ("invalid_request_error", "model_not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("requests", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    503: ("service_unavailable_error", "overloaded"),
}


@dataclass(slots=True, kw_only=True)
class Written:
    """The model's work for one request."""

    number: int
    created: int
    prompt_tokens: int
    cached_tokens: int
    tokens_each: int
    formed: Sequence[Formed] | None = None
    """The JSON that the request asks for."""


class Formed(NamedTuple):
    """An answer in the requested form, escaped for use inside a JSON string."""

    text: bytes
    tokens: int
    is_cut: bool


class Author:
    """Writes answers. Equal seeds write equal texts; each word and its space are one token of four bytes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        dice = random.Random(seed)
        self._text = 2 * b"".join(dice.choice(_WORDS) + b" " for _ in range(_POOL))
        self._numbers = array("f", (dice.gauss(0, 0.06) for _ in range(2 * _POOL)))
        self._digits = [b"%.6f" % number for number in self._numbers]

    def length(self, prompt: bytes, profile: Profile) -> int:
        """Number of output tokens for a request without a maximum: lognormal, the same for the same prompt."""
        share = (xxhash.xxh3_64_intdigest(prompt, self.seed ^ 1) + 0.5) / 2.0**64
        spread = math.exp(profile.output_sigma * _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))
        return max(1, min(round(profile.output_tokens * spread), OUTPUT_TOKENS_MAX))

    def text(self, prompt: bytes, tokens: int, choice: int = 0) -> bytes:
        start = 4 * (xxhash.xxh3_64_intdigest(prompt, self.seed + choice) % _POOL)
        end = start + 4 * tokens - 1
        if end <= len(self._text):
            return self._text[start:end]
        return (self._text * (end // len(self._text) + 1))[start:end]

    def formed(self, ask: Ask, form: Form, profile: Profile, *, is_bad: bool) -> list[Formed]:
        """The requested JSON, once for each choice; a maximum that is too small cuts it off."""
        prompt, found = ask.prompts[0], []
        most = ask.max_tokens or OUTPUT_TOKENS_MAX
        words = max(1, min(self.length(prompt, profile), most - tokens(b'{"answer":""}')))
        for choice in range(ask.choices):
            seed = xxhash.xxh3_64_intdigest(prompt, self.seed + choice)
            text = written(form, seed, self.text(prompt, words, choice).decode())
            kept = (text[:-1] if is_bad else text)[: 4 * most]
            inside = orjson.dumps(kept.decode("utf-8", "ignore"))[1:-1]
            found.append(Formed(inside, tokens(kept), len(text) > 4 * most))
        return found

    def answer(self, ask: Ask, done: Written, dimensions: int) -> bytes:
        model = orjson.dumps(ask.model)
        if ask.endpoint == EMBEDDINGS:
            vectors = (_EMBEDDING % (i, self._vector(ask, text, dimensions)) for i, text in enumerate(ask.prompts))
            return _EMBEDDINGS % (b",".join(vectors), model, done.prompt_tokens, done.prompt_tokens)
        if ask.endpoint == MODERATIONS:
            return _MODERATIONS % (done.number, model, b",".join([_MODERATION] * len(ask.prompts)))
        if ask.endpoint in (RERANK, SCORE):
            return self._scored(ask, done, model)
        if ask.endpoint == CHAT:
            return _CHAT % self._filled(_CHAT_CHOICE, ask, done, model)
        if ask.endpoint == COMPLETIONS:
            return _TEXT % self._filled(_TEXT_CHOICE, ask, done, model)
        return self._response(ask, done, model)

    def _filled(self, shape: bytes, ask: Ask, done: Written, model: bytes) -> tuple[object, ...]:
        if done.formed is not None:
            choices = b",".join(shape % (i, one.text, _reason(one.is_cut)) for i, one in enumerate(done.formed))
            return self._counted(done, model, choices, sum(one.tokens for one in done.formed))
        reason = _reason(ask.max_tokens is not None)
        each = [(prompt, choice) for prompt in ask.prompts for choice in range(ask.choices)]
        choices = b",".join(
            shape % (i, self.text(prompt, done.tokens_each, choice), reason) for i, (prompt, choice) in enumerate(each)
        )
        return self._counted(done, model, choices, done.tokens_each * len(each))

    @staticmethod
    def _counted(done: Written, model: bytes, choices: bytes, written: int) -> tuple[object, ...]:
        total = done.prompt_tokens + written
        return done.number, done.created, model, choices, done.prompt_tokens, written, total, done.cached_tokens

    def _response(self, ask: Ask, done: Written, model: bytes) -> bytes:
        one = Formed(b"", done.tokens_each, ask.max_tokens is not None) if done.formed is None else done.formed[0]
        is_cut = one.is_cut
        status = b"incomplete" if is_cut else b"completed"
        why = b'{"reason":"max_output_tokens"}' if is_cut else b"null"
        most = b"%d" % ask.max_tokens if ask.max_tokens is not None else b"null"
        text = one.text or self.text(ask.prompts[0], one.tokens)
        total = done.prompt_tokens + one.tokens
        head = (done.number, done.created, status, why, most, model, done.number, status, text)
        return _RESPONSE % (*head, done.prompt_tokens, done.cached_tokens, one.tokens, total)

    def _scored(self, ask: Ask, done: Written, model: bytes) -> bytes:
        """In vLLM's format. A score depends on the seed and the pair; reranked documents are sorted, the best first."""
        scores = [xxhash.xxh3_64_intdigest(pair, self.seed) / 2.0**64 for pair in ask.prompts]
        tokens = (done.prompt_tokens, done.prompt_tokens)
        if ask.endpoint == SCORE:
            data = b",".join(_SCORE % pair for pair in enumerate(scores))
            return _SCORES % (done.number, done.created, model, data, *tokens)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: ask.top_n]
        results = b",".join(_RANK % (index, orjson.dumps(ask.documents[index]), scores[index]) for index in best)
        return _RERANKING % (done.number, model, *tokens, results)

    def _vector(self, ask: Ask, text: bytes, dimensions: int) -> bytes:
        start = xxhash.xxh3_64_intdigest(text, self.seed) % _POOL
        if ask.is_base64:
            return b'"' + base64.b64encode(self._numbers[start : start + dimensions].tobytes()) + b'"'
        return b"[" + b",".join(self._digits[start : start + dimensions]) + b"]"


def _reason(is_cut: bool) -> bytes:
    return b"length" if is_cut else b"stop"


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """An error as OpenAI writes it."""
    kind, usual = _REASONS.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code or usual}})


def models_body(names: Sequence[str], created: int) -> bytes:
    data = [{"id": name, "object": "model", "created": created, "owned_by": "batchwright-simulator"} for name in names]
    return orjson.dumps({"object": "list", "data": data})
