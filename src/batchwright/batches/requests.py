"""Requests that Python code submits: a file, or an iterable of requests, which are written to a file one by one.

They are not kept in memory: an iterable may have millions of requests.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import orjson

from batchwright.batches.plan.lines import DEFAULT_ENDPOINT, ENDPOINTS, MIXED, why_refused
from batchwright.errors import InvalidInput, TooLarge
from batchwright.files.local import require_readable

Request = Mapping[str, Any]
"""A line of a batch file, or only the body of a request, which may have an extra `custom_id`."""
Requests = str | os.PathLike[str] | BinaryIO | Iterable[Request]
"""The path of a file, a file that is open in binary mode, or an iterable of requests."""
AsyncRequests = Requests | AsyncIterable[Request]

_LINE_FIELDS = frozenset({"body", "custom_id", "method", "url"})
_LINE_BYTES_MAX = 16 * 1024 * 1024
_PER_TURN = 200
_PIECE_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


class Defaults(NamedTuple):
    """Values for requests that do not name their own."""

    endpoint: str | None = None
    model: str | None = None


class _Url(msgspec.Struct):
    """The field of a line that says where it goes; the decoder skips all others."""

    url: str | None = None


_decode_url = msgspec.json.Decoder(_Url).decode


@contextmanager
def gather(requests: Requests, defaults: Defaults, bytes_max: int) -> Iterator[Path]:
    """The requests as a file: the caller's own, or one that is removed when the block ends."""
    if isinstance(requests, (str, os.PathLike)):
        yield _own_file(requests, defaults)
        return
    with _Spool(defaults, bytes_max) as spool:
        if (file := _as_file(requests, defaults)) is not None:
            spool.copy(file)
        else:
            for request in _as_iterable(requests):
                spool.add(request)
        yield spool.finish()


@asynccontextmanager
async def gather_async(requests: AsyncRequests, defaults: Defaults, bytes_max: int) -> AsyncIterator[Path]:
    """The same for async code, without blocking the event loop."""
    if isinstance(requests, (str, os.PathLike)):
        yield _own_file(requests, defaults)
        return
    with _Spool(defaults, bytes_max) as spool:
        if isinstance(requests, AsyncIterable):
            async for request in requests:
                spool.add(request)
        elif (file := _as_file(requests, defaults)) is not None:
            await asyncio.to_thread(spool.copy, file)
        else:
            for number, request in enumerate(_as_iterable(requests), 1):
                spool.add(request)
                if number % _PER_TURN == 0:
                    await asyncio.sleep(0)
        yield spool.finish()


def check_endpoint(named: str | None) -> str | None:
    if named is not None and named not in ENDPOINTS:
        raise InvalidInput(f"endpoint {why_refused(named)}", param="endpoint")
    return named


def find_endpoint(file: Path) -> str:
    """The endpoint that all lines have, or `MIXED`; chat completions if no line names any."""
    found: set[str] = set()
    with file.open("rb") as lines:
        while len(found) < 2 and (line := lines.readline(_LINE_BYTES_MAX)):
            found |= ENDPOINTS.keys() & {_read_url(line.removeprefix(_BOM))}
    return MIXED if len(found) > 1 else next(iter(found), DEFAULT_ENDPOINT)


class _Spool:
    """A file in a private temporary folder."""

    def __init__(self, defaults: Defaults, bytes_max: int) -> None:
        self._defaults = defaults
        self._room = self._bytes_max = bytes_max
        self._count = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="batchwright-requests-")
        self._path = Path(self._folder.name) / "requests.jsonl"
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._folder.cleanup()

    def add(self, request: Request) -> None:
        self._count += 1
        self._write(_as_line(request, self._count, self._defaults))

    def copy(self, file: BinaryIO) -> None:
        while piece := file.read(_PIECE_BYTES):
            if not isinstance(piece, bytes):
                raise InvalidInput('open the file of requests in binary mode: open(path, "rb")', param="requests")
            self._write(piece)

    def finish(self) -> Path:
        self._file.flush()
        return self._path

    def _write(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise TooLarge(
                f"the requests have more than {self._bytes_max} bytes, the limit batches.file_bytes_max; "
                "split them into several batches, or raise it",
                param="requests",
            )
        self._file.write(data)


def _own_file(path: str | os.PathLike[str], defaults: Defaults) -> Path:
    _refuse_model(defaults)
    return require_readable(Path(path))


def _as_file(requests: Any, defaults: Defaults) -> BinaryIO | None:
    if not hasattr(requests, "read"):
        return None
    _refuse_model(defaults)
    file: BinaryIO = requests
    return file


def _refuse_model(defaults: Defaults) -> None:
    if defaults.model is not None:
        raise InvalidInput("model= is for an iterable of requests; in a file each line names its model", param="model")


def _as_iterable(requests: object) -> Iterable[Request]:
    """Refuse a dict and bytes too: they can be iterated over, but not as requests."""
    if isinstance(requests, (Mapping, bytes)) or not isinstance(requests, Iterable):
        raise InvalidInput(
            f"requests is a {type(requests).__name__}; give the path of a file, a file that is open in binary mode, "
            "or an iterable of dicts",
            param="requests",
        )
    return requests


def _as_line(request: object, number: int, defaults: Defaults) -> bytes:
    """
    >>> _as_line({"custom_id": "a", "input": "Hello"}, 1, Defaults("/v1/embeddings", "small"))
    b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"small","input":"Hello"}}\\n'
    """
    if not isinstance(request, Mapping):
        raise InvalidInput(f"request {number} is a {type(request).__name__}, and not a dict", param="requests")
    around, body = _take_apart(request, number)
    line = {
        "custom_id": around.get("custom_id", f"request-{number}"),
        "method": around.get("method", "POST"),
        "url": around.get("url", defaults.endpoint or DEFAULT_ENDPOINT),
        "body": body if defaults.model is None else {"model": defaults.model, **body},
    }
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"request {number} is not JSON: {error}", param="requests") from error


def _take_apart(request: Request, number: int) -> tuple[Request, dict[str, Any]]:
    """The fields around the body, and the body."""
    if "body" not in request:
        body = {name: value for name, value in request.items() if name != "custom_id"}
        return {name: request[name] for name in ("custom_id",) if name in request}, body
    if strange := sorted(map(str, request.keys() - _LINE_FIELDS)):
        raise InvalidInput(f"request {number} has the field {strange[0]!r} beside its body", param="requests")
    if not isinstance(request["body"], Mapping):
        kind = type(request["body"]).__name__
        raise InvalidInput(f"the body of request {number} is a {kind}, and not a dict", param="requests")
    return request, dict(request["body"])


def _read_url(line: bytes) -> str | None:
    """None for a line that cannot be read: a worker reports what is wrong with it."""
    try:
        return _decode_url(line).url
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
