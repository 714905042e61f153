"""Reads JSON bodies: small ones at once, large ones in a thread, one job at a time.

orjson holds the interpreter's lock while it parses, so a thread alone does not keep the event loop free. A large body
is first cut into its jobs without parsing them; then it is parsed job by job, and other tasks run in between.
"""

from __future__ import annotations

import asyncio
from json import JSONDecodeError
from typing import Any

import msgspec
import orjson

from batchwright.errors import InvalidInput, TooLarge

LARGE_BYTES = 1024 * 1024
JOB_BYTES_MAX = 4 * 1024 * 1024
"""Enough for a payload of 1 MiB, even if each of its characters is escaped."""
_FIELDS_MAX = 100

_one_large = asyncio.Lock()
"""A parsed body takes up to thirty times its size in memory, so only one large body is parsed at a time."""
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


async def parse(body: bytes) -> Any:
    if len(body) <= LARGE_BYTES:
        return orjson.loads(body)
    async with _one_large:
        return await asyncio.to_thread(parse_large, body)


def parse_large(body: bytes) -> Any:
    """Like `orjson.loads`, for an object with a possibly long list `jobs`."""
    if not body.lstrip(b" \t\r\n").startswith(b"{"):
        raise InvalidInput("the body must be a JSON object", param="body")
    fields = _split(_object, body)
    if len(fields) > _FIELDS_MAX:
        raise TooLarge(f"the body has more than {_FIELDS_MAX} fields", param="body")
    return {name: _parse_jobs(value) if name == "jobs" else _parse_one(name, value) for name, value in fields.items()}


def _parse_jobs(value: msgspec.Raw) -> Any:
    if not bytes(value).startswith(b"["):
        return _parse_one("jobs", value)
    return [_parse_one(f"jobs.{n}", job) for n, job in enumerate(_split(_list, value))]


def _parse_one(name: str, value: msgspec.Raw) -> Any:
    if len(memoryview(value)) > JOB_BYTES_MAX:
        raise TooLarge(f"{name[:100]} has more than {JOB_BYTES_MAX} bytes", param=name[:100])
    return orjson.loads(bytes(value))


def _split(decoder: msgspec.json.Decoder[Any], document: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(document)
    except msgspec.DecodeError as error:
        raise JSONDecodeError(str(error), "", 0) from error
    except RecursionError as error:
        raise JSONDecodeError("it is nested too deeply", "", 0) from error
