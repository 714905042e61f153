"""Uploads by multipart/form-data, one part at a time: a file is passed on as a stream and never buffered whole.

>>> async for part in form(request.stream(), request.headers["content-type"]):
...     match part:
...         case Field():
...             fields[part.name] = part.value
...         case File():
...             stored = await store.put(key, part.chunks)
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import TYPE_CHECKING, NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from batchwright.errors import InvalidInput, TooLarge

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

BOUNDARY_CHARACTERS_MAX = 70
CONTENT_TYPE_CHARACTERS_MAX = 1_000
PARAMETERS_MAX = 64
"""Maximum number of parameters of a header: for each, the standard library scans all before it again."""
_AS_IT_IS = {"", "7bit", "8bit", "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormLimits:
    """Limits of one form; the size of a file is limited by the code that stores it, or here."""

    parts: int = 64
    field_bytes: int = 64 * 1024
    file_bytes: int | None = None
    header_bytes: int = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A part without a file name; names with brackets, such as `expires_after[anchor]`, are left as they are."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file. Read it before you request the next part; the rest of it is skipped."""

    name: str
    filename: str | None
    content_type: str | None
    chunks: AsyncIterator[bytes] = field(repr=False)


async def form(
    stream: AsyncIterator[bytes],
    content_type: str,
    limits: FormLimits | None = None,
    *,
    files: Collection[str] = ("file",),
) -> AsyncIterator[Field | File]:
    """The parts in the order in which they arrive. An invalid form raises InvalidInput or TooLarge.

    Parts named in `files` are files even if they have no file name.
    """
    limits = limits or FormLimits()
    events = _Events(stream, boundary(content_type), limits)
    seen = set[str]()
    while (headers := await events.next_part()) is not None:
        name, filename = _names(headers)
        if name in seen and not name.endswith("[]"):
            raise InvalidInput(f"the form has the field {name[:80]!r} twice; send it once", param=name)
        seen.add(name)
        if filename is None and name not in files:
            yield Field(name=name, value=await _value(name, events.data(), limits.field_bytes))
        else:
            chunks = _bounded(events.data(), limits.file_bytes)
            yield File(name=name, filename=filename, content_type=headers.get("content-type"), chunks=chunks)


def boundary(content_type: str) -> bytes:
    """The boundary between the parts, from the request's Content-Type."""
    if len(content_type) > CONTENT_TYPE_CHARACTERS_MAX or content_type.count(";") > PARAMETERS_MAX:
        raise InvalidInput(
            f"a Content-Type may have at most {CONTENT_TYPE_CHARACTERS_MAX} characters and {PARAMETERS_MAX} "
            f"parameters; this one begins with {content_type[:80]!r}"
        )
    message = _message("content-type", content_type)
    found = message.get_boundary("")
    if message.get_content_type() != "multipart/form-data" or not found:
        raise InvalidInput(
            "send the file as multipart/form-data with a boundary, "
            f"such as curl -F file=@name does; the Content-Type was {content_type[:80]!r}"
        )
    if len(found) > BOUNDARY_CHARACTERS_MAX or not (found.isascii() and found.isprintable()):
        raise InvalidInput(
            f"the boundary {found[:80]!r} must have at most {BOUNDARY_CHARACTERS_MAX} printable ASCII characters"
        )
    return found.encode()


class _Events:
    """What the parser finds in one chunk of the stream; the next chunk is read when all of that is consumed.

    Headers are the beginning of a part, bytes its data, and None its end.
    """

    def __init__(self, stream: AsyncIterator[bytes], boundary: bytes, limits: FormLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._opening = b"--" + boundary
        self._head: bytes | None = b""
        self._found = deque[dict[str, str] | bytes | None]()
        self._headers = dict[str, str]()
        self._header = bytearray(), bytearray()
        self._header_bytes = 0
        self._begun = self._taken = 0
        self._inside = self._over = False
        self._parser = MultipartParser(boundary, self._callbacks(), max_header_size=limits.header_bytes)

    async def next_part(self) -> dict[str, str] | None:
        """The headers of the next part, after skipping the unread rest of the last one; None at the end of the form."""
        while self._inside:
            await self._take()
        while not self._found:
            if self._over:
                return None
            await self._feed()
        headers = self._found.popleft()
        assert isinstance(headers, dict), "a part begins with its headers"
        self._inside = True
        self._taken += 1
        return headers

    async def data(self) -> AsyncIterator[bytes]:
        """The bytes of the part whose headers were read last."""
        part = self._taken
        while self._inside and self._taken == part:
            if chunk := await self._take():
                yield chunk

    async def _take(self) -> bytes:
        while not self._found:
            await self._feed()
        found = self._found.popleft()
        assert not isinstance(found, dict), "a part ends before the next begins"
        self._inside = found is not None
        return found or b""

    async def _feed(self) -> None:
        """Parse one more chunk of the stream."""
        chunk = await anext(self._stream, None)
        if chunk is None:
            _refuse("it ends before its last boundary; the upload was probably cut short")
        if self._head is not None:
            chunk = self._opened(self._head + chunk)
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidInput(f"the form cannot be read: {error}") from error

    def _opened(self, head: bytes) -> bytes:
        """Hold back the first bytes until there are enough to check that they are the boundary.

        The parser would skip some other beginnings, and which ones depends on how the bytes are cut into chunks.
        """
        head = head.lstrip(b"\r\n")
        if not self._opening.startswith(head[: len(self._opening)]):
            _refuse("it does not begin with the boundary that its Content-Type names")
        enough = len(head) >= len(self._opening)
        self._head = None if enough else head
        return head if enough else b""

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": lambda: self._found.append(self._headers),
            "on_part_data": lambda data, start, end: self._found.append(data[start:end]),
            "on_part_end": lambda: self._found.append(None),
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._begun += 1
        if self._begun > self._limits.parts:
            raise TooLarge(f"the form has more than {self._limits.parts} parts")
        self._headers, self._header_bytes = {}, 0

    def _on_header(self, place: int, text: bytes) -> None:
        self._header_bytes += len(text)
        if self._header_bytes > self._limits.header_bytes:
            raise TooLarge(f"the headers of a part of the form have more than {self._limits.header_bytes} bytes")
        self._header[place].extend(text)

    def _on_header_end(self) -> None:
        name, value = (bytes(text) for text in self._header)
        self._header = bytearray(), bytearray()
        try:
            self._headers[name.decode("ascii").lower()] = value.decode().strip()
        except UnicodeDecodeError:
            _refuse(f"the header {name[:80]!r} of a part is not UTF-8")

    def _on_end(self) -> None:
        self._over = True


def _names(headers: dict[str, str]) -> tuple[str, str | None]:
    """The name of the field, and of the file if it is one; RFC 5987's `filename*` has priority over `filename`."""
    disposition = headers.get("content-disposition", "")
    if headers.get("content-transfer-encoding", "").lower() not in _AS_IT_IS:
        _refuse("a part has a Content-Transfer-Encoding; send its bytes as they are")
    kind, *parameters = _parameters(disposition)
    plain = {name.lower(): value for name, value in parameters if isinstance(value, str)}
    coded = {name.lower(): collapse_rfc2231_value(value) for name, value in parameters if not isinstance(value, str)}
    found = plain | coded
    if kind[0].lower() != "form-data" or not found.get("name"):
        _refuse(f"a part has no name; its Content-Disposition was {disposition[:80]!r}")
    if any(not text.isprintable() for text in found.values()):
        _refuse(f"the names {disposition[:80]!r} have characters that cannot be printed")
    return found["name"], found.get("filename") or None


_Parameter = tuple[str, str | tuple[str | None, str | None, str]]


def _parameters(disposition: str) -> list[_Parameter]:
    if disposition.count(";") > PARAMETERS_MAX:
        _refuse(f"a part's Content-Disposition has more than {PARAMETERS_MAX} semicolons: {disposition[:80]!r}")
    try:
        found = _message("content-disposition", disposition).get_params([], "content-disposition")
    except (ValueError, LookupError):
        _refuse(f"a part's Content-Disposition cannot be read: {disposition[:80]!r}")
    return [*found] or [("", "")]


def _message(name: str, value: str) -> Message:
    message = Message()
    message[name] = value
    return message


async def _value(name: str, chunks: AsyncIterator[bytes], limit: int) -> str:
    value = bytearray()
    async for chunk in chunks:
        value += chunk
        if len(value) > limit:
            raise TooLarge(f"the field {name[:80]!r} has more than {limit} bytes", param=name)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the field {name[:80]!r} is not UTF-8", param=name) from None


async def _bounded(chunks: AsyncIterator[bytes], limit: int | None) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if limit is not None and size > limit:
            raise TooLarge(f"the file is larger than {limit} bytes, which is the limit", param="file")
        yield chunk


def _refuse(reason: str) -> NoReturn:
    raise InvalidInput(f"the form cannot be read: {reason}")
