"""Every parser of data from strangers: any input is read or refused, in a time that is proportional to its length.

For twice the input, the time may double, but not quadruple.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from json import JSONDecodeError
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request

from batchwright.api import access, routes
from batchwright.api.bodies import JOB_BYTES_MAX, parse, parse_large
from batchwright.api.errors import Refusal
from batchwright.batches.output.results import Cursor as ResultCursor
from batchwright.engine.views import Cursor
from batchwright.errors import BatchwrightError, InvalidInput, TooLarge
from batchwright.files import http as files
from batchwright.ingest.views import read_cursor
from batchwright.storage.form import boundary, form
from batchwright.telemetry import tracing

REFUSALS = (BatchwrightError, Refusal, JSONDecodeError)
REPEATED = 10_000
FLOOR_SECONDS = 0.01
"""Shorter times are too inexact to compare."""


def read_form(text: str) -> None:
    """Parse the text as the body of a form, in chunks, and as the header of one of its parts."""
    asyncio.run(read_all(text.encode("utf-8", "replace")))
    part = f"--b\r\nContent-Disposition: form-data; name=a; {text}\r\n\r\nx\r\n--b--\r\n"
    asyncio.run(read_all(part.encode("utf-8", "replace")))


async def read_all(data: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 4_096):
            yield data[start : start + 4_096]

    try:
        async for part in form(chunks(), "multipart/form-data; boundary=b"):
            assert part.name
    except InvalidInput:
        pass


def is_json(text: str) -> None:
    routes._is_json(Request({"type": "http", "headers": [(b"content-type", as_header(text))]}))


def as_header(text: str) -> bytes:
    return text.encode("latin-1", "replace")


PARSERS: dict[str, Callable[[str], Any]] = {
    "authorization": lambda text: access._secret(Headers(raw=[(b"authorization", as_header(text))])),
    "boundary": boundary,
    "boundary of a form": lambda text: boundary(f"multipart/form-data; boundary=b; {text}"),
    "content type": is_json,
    "cursor": Cursor.parse,
    "cursor of documents": lambda text: read_cursor(text, r"[0-9]{1,15}"),
    "cursor of results": ResultCursor.parse,
    "form": read_form,
    "host": access._name,
    "json": lambda text: parse_large(text.encode("utf-8", "replace")),
    "range": lambda text: files._parse_range(text, 1_000),
    "seconds": files._check_seconds,
    "trace": tracing.parsed,
}
TOKENS = ['"', ";", '";', "x=", "\\", '\\"', "*0=", "bytes=", "-", "0", ",", "[", "{", '{"a":', ":", ".", "\r\n", "--b"]
TOKENS += ["\r\n--b", "--b\r\n", "a: b\r\n", " ", "=", "A", "é", "Bearer ", "[::1]", "%41", "'", "*=UTF-8''", "00-"]


def refused(parser: Callable[[str], Any], text: str) -> bool:
    try:
        parser(text)
    except REFUSALS:
        return True
    return False


def seconds(parser: Callable[[str], Any], text: str) -> float:
    """The shortest processor time of three runs."""

    def once() -> float:
        began = time.process_time()
        refused(parser, text)
        return time.process_time() - began

    first = once()
    return first if first < FLOOR_SECONDS else min(first, once(), once())


@pytest.mark.timed  # it limits processor times
@pytest.mark.parametrize("name", PARSERS)
def test_the_time_of_every_parser_grows_in_proportion_to_its_input(name: str) -> None:
    parser = PARSERS[name]
    for start in ("", '{"jobs":[', "bytes=", "--b\r\n", 'x="', "multipart/form-data; boundary=b; x="):
        for token in TOKENS:
            size = REPEATED // len(token)
            taken = max(FLOOR_SECONDS, seconds(parser, start + token * size))
            four = seconds(parser, start + token * (4 * size))
            assert four < 10 * taken, (start, token, taken, four)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.one_of(st.sampled_from(TOKENS), st.text(max_size=5)), max_size=30), again=st.integers(1, 300))
@pytest.mark.parametrize("name", PARSERS)
def test_any_input_is_read_or_refused(name: str, tokens: list[str], again: int) -> None:
    refused(PARSERS[name], "".join(tokens) * again)


def test_a_content_type_that_would_take_minutes_to_parse_is_refused_at_once() -> None:
    hostile = 'multipart/form-data; boundary=b; x="' + ";" * 320_000
    began = time.process_time()
    with pytest.raises(InvalidInput, match="at most 1000 characters and 64 parameters"):
        boundary(hostile)
    is_json(hostile)
    part = f'--b\r\nContent-Disposition: form-data; name="file"; x="{";" * 8_000}"\r\n\r\nx\r\n--b--\r\n'
    with pytest.raises(InvalidInput, match="more than 64 semicolons"):
        asyncio.run(strictly(part.encode()))
    assert time.process_time() - began < 1


async def strictly(data: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data

    async for _ in form(chunks(), "multipart/form-data; boundary=b"):
        pass


# Large bodies -----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(body=st.dictionaries(st.sampled_from(["jobs", "a", "é"]), JSON), jobs=st.lists(JSON, max_size=5))
def test_a_large_body_is_read_like_a_small_one(body: dict[str, Any], jobs: list[Any]) -> None:
    for one in (body, {**body, "jobs": jobs}):
        for written in (orjson.dumps(one), orjson.dumps(one, option=orjson.OPT_INDENT_2)):
            assert parse_large(written) == orjson.loads(written)


async def test_an_invalid_large_body_is_refused() -> None:
    space = b" " * (1024 * 1024)
    assert await parse(b'{"jobs": [{}]}' + space) == {"jobs": [{}]}
    for bad in (b'{"jobs": [NaN]}', b'{"jobs": [1,]}', b'{"jobs": ["\\ud800"]}', b'{"jobs": ["\xff"]}', b'{"a": 1'):
        with pytest.raises(ValueError):
            await parse(bad + space)
    with pytest.raises(InvalidInput, match="must be a JSON object"):
        await parse(b"[" + b"[]," * 500_000 + b"[]]")
    with pytest.raises(TooLarge, match=r"jobs\.1 has more than"):
        await parse(b'{"jobs": [{}, "' + b"x" * JOB_BYTES_MAX + b'"]}')


async def test_reading_a_large_body_does_not_block_other_requests() -> None:
    job = orjson.dumps({"job_type": "echo", "payload": {"value": [[]] * 10_000}})
    body = b'{"jobs":[' + b",".join([job] * 50) + b"]}"
    reading = asyncio.create_task(parse(body))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await reading)["jobs"]) == 50
    assert turns > 10
