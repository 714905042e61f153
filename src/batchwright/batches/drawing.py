"""Charts of a batch's progress, and the gist of a line, for the pages of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from markupsafe import Markup

from batchwright.batches.samples import BatchSample, together
from batchwright.web.charts import SERIES_MAX, Series, line_chart

POINTS_MAX = 120
_GIST_CHARACTERS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Gist:
    """A short summary of a line of results."""

    custom_id: str
    status_code: int | None
    code: str | None
    """The error's code; None for a good answer."""
    text: str
    tokens: int | None = None

    @property
    def is_good(self) -> bool:
        return self.code is None


def course(samples: Sequence[BatchSample]) -> list[tuple[str, Markup]]:
    """The charts of a batch, each with its heading; none until there are two steps."""
    steps = _coarser(together(samples))
    if len(steps) < 2:
        return []
    drawn = [
        ("Requests per second", _chart("Requests per second", "/s", steps, answered=_completed, failed=_failed)),
        ("Tokens per second", _chart("Tokens per second", "/s", steps, prompts=_input, answers=_output)),
    ]
    if any(one.limit is not None for one in steps):
        title = "Requests in flight and their limit"
        drawn.append((title, _chart(title, "", steps, limit=lambda one: one.limit, flight=lambda one: one.in_flight)))
    models = sorted({one.model for one in samples})
    if len(models) > 1:
        series = [
            Series(model, [(one.at, _completed(one)) for one in _coarser(_of_model(samples, model))])
            for model in models[:SERIES_MAX]
        ]
        drawn.append(("Requests per second by model", line_chart(series, label="Requests per second by model")))
    return drawn


def gist(line: bytes) -> Gist:
    """Summarise a line of results: the text of the answer, or what went wrong."""
    found = orjson.loads(line)
    response, error = found.get("response") or {}, found.get("error") or {}
    body = response.get("body")
    code = error.get("code") if error else _code_of(response)
    text = error.get("message") if error else _text_of(body)
    usage = body.get("usage") if isinstance(body, dict) else None
    return Gist(
        custom_id=str(found.get("custom_id", "")),
        status_code=response.get("status_code"),
        code=None if code is None else str(code),
        text=str(text or "")[:_GIST_CHARACTERS_MAX],
        tokens=usage.get("total_tokens") if isinstance(usage, dict) else None,
    )


def prompt_of(request: bytes) -> str:
    """The prompt of a request, as far as it is text."""
    body = orjson.loads(request).get("body") or {}
    for name in ("messages", "input", "prompt", "query"):
        if name in body:
            return _plain(body[name])[:_GIST_CHARACTERS_MAX]
    return ""


def pretty(line: bytes | None) -> str:
    """The line as indented JSON, for people."""
    return "" if line is None else msgspec.json.format(line.strip(), indent=2).decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------------------------------


def _of_model(samples: Sequence[BatchSample], model: str) -> list[BatchSample]:
    return [one for one in samples if one.model == model]


def _coarser(steps: Sequence[BatchSample]) -> list[BatchSample]:
    """Limit the number of points by merging neighbours."""
    size = -(-len(steps) // POINTS_MAX)
    return [_merge(steps[at : at + size]) for at in range(0, len(steps), size)] if size > 1 else list(steps)


def _merge(steps: Sequence[BatchSample]) -> BatchSample:
    last = steps[-1]
    return BatchSample(
        model=last.model,
        at=steps[0].at,
        seconds=sum(one.seconds for one in steps),
        completed=sum(one.completed for one in steps),
        failed=sum(one.failed for one in steps),
        input_tokens=sum(one.input_tokens for one in steps),
        cached_tokens=sum(one.cached_tokens for one in steps),
        output_tokens=sum(one.output_tokens for one in steps),
        limit=last.limit,
        in_flight=last.in_flight,
    )


def _completed(one: BatchSample) -> float:
    return one.completed / one.seconds


def _failed(one: BatchSample) -> float:
    return one.failed / one.seconds


def _input(one: BatchSample) -> float:
    return one.input_tokens / one.seconds


def _output(one: BatchSample) -> float:
    return one.output_tokens / one.seconds


def _chart(
    label: str, unit: str, steps: Sequence[BatchSample], **lines: Callable[[BatchSample], float | None]
) -> Markup:
    names = {"flight": "in flight"}
    series = [Series(names.get(name, name), [(one.at, of(one)) for one in steps]) for name, of in lines.items()]
    return line_chart(series, label=label, unit=unit)


def _code_of(response: dict[str, Any]) -> str | None:
    """The code of an answer whose status is an error."""
    status = response.get("status_code")
    if not isinstance(status, int) or status < 300:
        return None
    body = response.get("body")
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code") or error.get("type") or status) if isinstance(error, dict) else str(status)


def _text_of(body: Any) -> str:
    if not isinstance(body, dict):
        return str(body or "")
    if isinstance(error := body.get("error"), dict):
        return str(error.get("message") or "")
    for choice in body.get("choices") or ():
        message = choice.get("message") or {}
        return _plain(message.get("content") or choice.get("text") or message.get("tool_calls") or "")
    for one in body.get("output") or ():
        if isinstance(one, dict) and "content" in one:
            return _plain(one["content"])
    if isinstance(data := body.get("data"), list):
        return f"{len(data):,} results"
    return msgspec.json.encode(body).decode()


def _plain(value: Any) -> str:
    """The text in messages of any format."""
    match value:
        case str():
            return value
        case list():
            return "\n".join(_plain(one) for one in value)
        case {"text": str(text)}:
            return text
        case {"role": str(role), "content": content}:
            return f"{role}: {_plain(content)}"
        case _:
            return msgspec.json.encode(value).decode()
