"""Sends the file with a completion's requests, and reads its results.

The file has OpenAI's lines: `custom_id`, `method`, `url` and `body`. Results are matched by `custom_id` alone: they
come in any order, some twice, some never, some cut in half.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from batchwright.errors import Fatal, SchemaInvalid
from batchwright.inference.http import MIB, Upload
from batchwright.providers.contract import (
    Abilities,
    Counts,
    Ending,
    Input,
    Phase,
    Problem,
    Request,
    Result,
    Status,
    Usage,
)
from batchwright.providers.errors import ErrorTable, Kind, describe
from batchwright.providers.lines import split_lines
from batchwright.providers.tools import AdapterTools
from batchwright.providers.translate.chat import Unmapped

CHAT = "/v1/chat/completions"
PROBLEMS_MAX = 100
MARKER = "bw_key"
"""The name of our marker in a provider's metadata."""
TOKENS_MAX = 2**31 - 1
_INPUT_LINE_BYTES_MAX = 16 * MIB
_OPTIONS = frozenset({"completion_window", "endpoint"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of the file."""

    number: int
    """From 1."""
    custom_id: str
    url: str
    body: Mapping[str, Any] = field(repr=False)
    raw: bytes = field(repr=False)


class BadLine(SchemaInvalid):
    """A line that cannot be sent. The message says why."""

    def __init__(self, number: int, message: str, param: str | None = None) -> None:
        super().__init__(f"line {number}: {message}", code="invalid_line")
        self.param = param


def parse_line(number: int, raw: bytes | None) -> Line:
    if raw is None:
        raise BadLine(number, f"it is longer than {_INPUT_LINE_BYTES_MAX} bytes")
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadLine(number, f"it is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise BadLine(number, "it is not a JSON object")
    if not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise BadLine(number, "custom_id must be a string that is not empty", "custom_id")
    if not isinstance(line.get("body"), dict):
        raise BadLine(number, "body must be a JSON object", "body")
    if not isinstance(line.get("url", ""), str):
        raise BadLine(number, "url must be a string", "url")
    return Line(number=number, custom_id=line["custom_id"], url=line.get("url", ""), body=line["body"], raw=raw.strip())


async def read_lines(tools: AdapterTools, request: Request) -> AsyncGenerator[Line, None]:
    """The requests of the file, up to the first invalid line, which raises an error."""
    number = 0
    async with aclosing(_split(tools, request)) as lines:
        async for raw in lines:
            number += 1
            yield parse_line(number, raw)


def check_request(request: Request, abilities: Abilities, endpoints: Iterable[str]) -> list[Problem]:
    """What is wrong with a completion, as far as that is visible without its file."""
    if request.task_type != "completion":
        return [Problem(message=f"a task of type {request.task_type} is not for this provider", param="task_type")]
    if len(request.inputs) != 1:
        return [Problem(message="a completion has one input, the file of its requests", param="inputs")]
    problems = [
        Problem(message=f"the option {name!r} is unknown; use one of: {', '.join(sorted(_OPTIONS))}", param=name)
        for name in sorted(set(request.options) - _OPTIONS)
    ]
    input, most = request.inputs[0], abilities.request_bytes_max
    if most is not None and input.bytes is not None and input.bytes > most:
        message = f"the file has {input.bytes} bytes; the provider accepts {most}"
        problems.append(Problem(message=message, input_id=input.id))
    if not any(endpoint_of(request).startswith(one) for one in endpoints):
        message = f"the endpoint is {endpoint_of(request)!r}; use one of: {', '.join(endpoints)}"
        problems.append(Problem(message=message, param="endpoint"))
    return problems


async def check_lines(
    tools: AdapterTools,
    request: Request,
    abilities: Abilities,
    check: Callable[[Line], Iterable[Problem]] = lambda line: (),
) -> list[Problem]:
    """What is wrong with the lines of the file, by line number; at most the first hundred problems."""
    checker = _Checker(request, abilities, check)
    number = 0
    async with aclosing(_split(tools, request)) as lines:
        async for raw in lines:
            number += 1
            checker.look_at(number, raw)
            if len(checker.problems) >= PROBLEMS_MAX:
                break
    if number == 0:
        checker.add("the file has no requests")
    return checker.problems


class _Checker:
    def __init__(self, request: Request, abilities: Abilities, check: Callable[[Line], Iterable[Problem]]) -> None:
        self.problems: list[Problem] = []
        self._abilities = abilities
        self._check = check
        self._input = request.inputs[0]
        self._endpoint = endpoint_of(request)
        self._model: Any = None
        self._size = 0
        self._seen: dict[str, int] = {}

    def add(self, message: str, param: str | None = None, line: int | None = None) -> None:
        self.problems.append(Problem(message=message, input_id=self._input.id, param=param, line=line))

    def look_at(self, number: int, raw: bytes | None) -> None:
        self._measure(number, raw or b"")
        try:
            line = parse_line(number, raw)
        except BadLine as error:
            self.add(str(error), error.param, number)
            return
        first = self._seen.setdefault(line.custom_id, number)
        if first != number:
            self.add(f"line {number}: line {first} has the same custom_id", "custom_id", number)
        if line.url and line.url != self._endpoint:
            message = f"line {number}: its url is {line.url[:100]!r}, but the batch is for {self._endpoint}"
            self.add(message, "url", number)
        model = line.body.get("model")
        self._model = self._model or model
        if model != self._model:
            self.add(
                f"line {number}: its model differs from that of earlier lines; a batch has one model",
                "body.model",
                number,
            )
        self.problems += [replace(problem, line=number) for problem in self._check(line)]

    def _measure(self, number: int, raw: bytes) -> None:
        requests, size = self._abilities.requests_max, self._abilities.request_bytes_max
        if requests is not None and number == requests + 1:
            self.add(f"the file has more than {requests} requests, the provider's limit")
        if size is not None and self._size <= size < self._size + len(raw):
            self.add(f"the file has more than {size} bytes, the provider's limit")
        self._size += len(raw)


def endpoint_of(request: Request) -> str:
    return str(request.options.get("endpoint", CHAT))


async def measured(tools: AdapterTools, request: Request, write: Callable[[Line], bytes], *frame: bytes) -> Upload:
    """The file in the provider's format, a line at a time. It is read once in advance to measure its length.

    `frame` is the text before, between and after the lines; without it, each line ends with a line feed.
    """
    before, between, after = frame or (b"", b"", b"")

    async def chunks() -> AsyncIterator[bytes]:
        held = [before]
        size = 0
        async with aclosing(read_lines(tools, request)) as lines:
            async for line in lines:
                piece = _written(line, write) + (b"" if frame else b"\n")
                held += [between, piece] if line.number > 1 else [piece]
                size += len(piece)
                if size >= MIB:
                    yield b"".join(held)
                    held, size = [], 0
        yield b"".join([*held, after])

    length = 0
    async for chunk in chunks():
        length += len(chunk)
    kind = "application/json" if frame else "application/jsonl"
    return Upload(length=length, open=chunks, content_type=kind)


def _written(line: Line, write: Callable[[Line], bytes]) -> bytes:
    try:
        return write(line)
    except Unmapped as error:
        raise BadLine(line.number, str(error), f"body.{error.field}") from None


async def line_ids(tools: AdapterTools, request: Request) -> Sequence[str]:
    """The custom_ids of the file, in its order."""
    return [line.custom_id async for line in read_lines(tools, request)]


async def expected_ids(tools: AdapterTools, request: Request) -> Sequence[str] | None:
    """The custom_ids of the file; None if the file is gone. Then the results are fetched anyway: they were paid for."""
    try:
        return await line_ids(tools, request)
    except (Fatal, SchemaInvalid) as error:
        log.warning("the requests of a provider's job cannot be read, so its results are not compared: %s", error)
        return None


class Malformed(ValueError):
    """A line of results that cannot be read."""


async def read_results(chunks: AsyncIterator[bytes], read: Callable[[bytes], Result | None]) -> AsyncIterator[Result]:
    """The results in a file. An unreadable line is logged and skipped, so its result is missing."""
    number = 0
    async for raw in split_lines(chunks):
        number += 1
        try:
            if raw is None:
                raise Malformed("it is too long")
            result = read(raw)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            log.warning("line %d of a provider's results cannot be read: %s", number, type(error).__name__)
            continue
        if result is not None:
            yield result


async def reconcile(
    results: AsyncIterator[Result], expected: Sequence[str] | None, missing: Mapping[str, Any]
) -> AsyncGenerator[Result, None]:
    """One result for each request: the first of several, or `missing`. Results for unknown requests are marked."""
    left = None if expected is None else dict.fromkeys(expected)
    seen: set[str] = set()
    async for result in results:
        if result.key in seen:
            log.warning("a provider's results hold a key twice; the first is kept")
            continue
        seen.add(result.key)
        if left is not None and result.key not in left:
            log.warning("a provider's results hold a key that was never sent")
            yield _mark_unknown(result)
            continue
        if left is not None:
            del left[result.key]
        yield result
    for key in left or ():
        yield Result(key=key, error=missing)


async def compare(
    tools: AdapterTools, request: Request, status: Status, results: AsyncIterator[Result]
) -> AsyncIterator[Result]:
    """The results of a job, one for each line of its file."""
    expected = await expected_ids(tools, request)
    async with aclosing(reconcile(results, expected, missing_error(status))) as compared:
        async for result in compared:
            yield result


def _mark_unknown(result: Result) -> Result:
    error: dict[str, Any] = {
        "kind": Kind.FATAL.value,
        "code": "unknown_key",
        "message": "the provider answered a request that was never sent",
    }
    response = (result.value or result.error or {}).get("response")
    return Result(key=result.key, error=error | ({"response": response} if response else {}), usage=result.usage)


def missing_error(status: Status) -> Mapping[str, Any]:
    """Why a request has no result, depending on how its job ended."""
    match status.ending:
        case Ending.EXPIRED:
            return _error(Kind.TRANSIENT, "batch_expired", "the provider's job expired before this request was run")
        case Ending.CANCELLED:
            return _error(Kind.FATAL, "batch_cancelled", "the job was cancelled before this request was run")
        case Ending.FAILED if status.error is not None:
            return status.error
        case _:
            return _error(Kind.TRANSIENT, "missing_result", "the provider has no result for this request")


def _error(kind: Kind, code: str, message: str) -> Mapping[str, Any]:
    return {"kind": kind.value, "code": code, "message": message}


def succeeded(custom_id: str, body: Mapping[str, Any], *, id: str = "", request_id: str = "") -> Result:
    """A result as OpenAI's output line."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    line = {"id": id or f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}
    return Result(key=custom_id, value=line, usage=usage_of(body))


def read_openai_line(table: ErrorTable, raw: bytes) -> Result:
    """Parse an output line. It is a failure if it has an error, or a response with a status other than 2xx."""
    line = orjson.loads(raw)
    custom_id, response, error = line["custom_id"], line.get("response"), line.get("error")
    if not isinstance(custom_id, str):
        raise Malformed("its custom_id is not a string")
    status = response.get("status_code") if isinstance(response, dict) else None
    body = response.get("body") if isinstance(response, dict) else None
    if not error and isinstance(status, int) and 200 <= status < 300 and isinstance(body, dict):
        return Result(key=custom_id, value={**line, "error": None}, usage=usage_of(body))
    if not error and status is None:
        raise Malformed("it has neither a response nor an error")
    described = describe(table, error or body, status)
    if response:
        described["response"] = response
    return Result(key=custom_id, error=described)


def usage_of(body: Mapping[str, Any]) -> Usage:
    """Tokens as OpenAI's answers count them; an implausible number counts as unknown."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return Usage()
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    return Usage(
        input_tokens=count(usage.get("prompt_tokens", usage.get("input_tokens"))),
        output_tokens=count(usage.get("completion_tokens", usage.get("output_tokens"))),
        cached_tokens=count(details.get("cached_tokens")) if isinstance(details, Mapping) else None,
    )


def count(value: Any) -> int | None:
    """A count, as a number or as a string, which Google uses."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= TOKENS_MAX else None


def texts(document: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The fields that are non-empty strings."""
    return {name: value for name in names if isinstance(value := document.get(name), str) and value}


def ending_of(counts: Counts) -> Ending:
    """How a job that reports itself complete ended."""
    if counts.succeeded is None or counts.total is None:
        return Ending.SUCCEEDED
    if counts.succeeded == 0:
        return Ending.FAILED
    return Ending.SUCCEEDED if counts.succeeded >= counts.total else Ending.PARTIAL


COMPLETE = "complete"
"""Entry in a table of statuses: the job has ended, and its counts say how."""
Statuses = Mapping[str, Phase | Ending | str]


def read_status(statuses: Statuses, raw: str, counts: Counts) -> tuple[Phase, Ending | None]:
    """Looks up a provider's status in its table. An unknown status counts as running, and is logged."""
    known = statuses.get(raw)
    if known is None:
        log.warning("a provider's job has the status %r, which is unknown; it counts as running", raw[:100])
        return Phase.RUNNING, None
    if isinstance(known, Phase):
        return known, None
    return Phase.ENDED, known if isinstance(known, Ending) else ending_of(counts)


def lost(status_code: int) -> Status:
    """The provider does not know the job, which may be temporary."""
    return Status(
        phase=Phase.RUNNING,
        raw_status=str(status_code),
        is_error=True,
        error=_error(Kind.FATAL, "remote_job_lost", "the provider does not know the job"),
    )


def if_whole(status: Status) -> Status | None:
    """A status from a list, which may omit fields: None if the job has ended and its results' place is missing."""
    is_short = status.phase is Phase.ENDED and not status.found and status.error is None
    return None if is_short else status


def input_of(request: Request) -> Input:
    return request.inputs[0]


def _split(tools: AdapterTools, request: Request) -> Any:
    return split_lines(tools.read(input_of(request)), _INPUT_LINE_BYTES_MAX)
