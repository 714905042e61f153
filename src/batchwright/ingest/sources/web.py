"""Documents by URL: fetched without credentials, and only from the public internet unless `private` is set.

Every hop of a redirect is checked in the same way: by its name before the request, and by the address that really
answered. So a name that resolves to another address the second time cannot get around the check.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

from batchwright.errors import Fatal, InvalidInput, OperationError, RateLimited
from batchwright.inference.addresses import Address, is_private, is_special, resolve
from batchwright.inference.answers import Failure, retry_after_seconds
from batchwright.inference.http import Http, Incoming, NoAnswer
from batchwright.ingest.extract.detect import EXTENSIONS
from batchwright.ingest.sources.listing import shown_name
from batchwright.ingest.sources.parse import canonical_url
from batchwright.ingest.sources.settings import FetchSettings
from batchwright.ingest.sources.sink import PIECE_BYTES, About, NotModified, Sink, closing, gone, refused, unavailable

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN = frozenset({408, 425})
_WHOLE = frozenset({200, 203})
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}")
_ETAG, _MODIFIED = "etag ", "modified "
_HEADER_CHARACTERS_MAX = 500
_NAME = re.compile(r"""(?:^|;)\s*filename\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]+))""", re.IGNORECASE)
_NAME_ENCODED = re.compile(r"(?:^|;)\s*filename\*\s*=\s*(utf-8|iso-8859-1)'[^']*'([^;\s]+)", re.IGNORECASE)
_NAME_CHARACTERS_MAX = 200
_BY_MEDIA_TYPE = {
    "application/json": ".json",
    "application/x-ndjson": ".jsonl",
    "text/csv": ".csv",
    "text/markdown": ".md",
    "text/tab-separated-values": ".tsv",
}
"""Formats that look like any other text, so that the media type is the better evidence."""


class Web:
    """Fetches by URL, through the HTTP client of the process."""

    def __init__(
        self,
        http: Http,
        settings: FetchSettings,
        *,
        is_refused: Callable[[Address], bool] = is_private,
        resolve: Callable[[str], Awaitable[Sequence[Address]]] = resolve,
    ) -> None:
        self._http = http
        self._is_refused = is_special if settings.private else is_refused
        self._resolve = resolve
        self._settings = settings

    async def fetch(self, url: str, sink: Sink, etag: str | None) -> About | NotModified:
        for _ in range(self._settings.redirects_max + 1):
            await self._check_name(url)
            try:
                async with self._http.open("GET", url, headers=_conditions(etag)) as incoming:
                    self._check_peer(url, incoming)
                    if incoming.status not in _REDIRECTS:
                        return await _take(url, incoming, sink, etag)
                    url = _next_url(url, incoming)
            except NoAnswer as error:
                raise _lost(url, error) from None
        raise refused(f"{_host(url)} redirects more than {self._settings.redirects_max} times (redirects_max)")

    async def _check_name(self, url: str) -> None:
        try:
            found = await self._resolve(_host(url))
        except (OSError, UnicodeError):
            raise unavailable(f"the name {_host(url)} is unknown") from None
        if not found or any(self._is_refused(address) for address in found):
            raise _private(url)

    def _check_peer(self, url: str, incoming: Incoming) -> None:
        is_unknown = incoming.address is None and not self._settings.private
        if is_unknown or (incoming.address is not None and self._is_refused(incoming.address)):
            raise _private(url)


async def _take(url: str, incoming: Incoming, sink: Sink, etag: str | None) -> About | NotModified:
    if incoming.status == 304 and etag is not None:
        return NotModified(etag=etag)
    if incoming.status not in _WHOLE:
        raise _refusal(url, incoming)
    sink.check_size(incoming.length)
    await sink.pour(_body(url, incoming))
    media_type = _MEDIA_TYPE.match(incoming.headers.get("content-type", "").strip())
    kind = media_type[0].lower() if media_type else None
    return About(etag=_etag(incoming, sink.size), media_type=kind, name=_name(url, incoming, kind))


def _next_url(url: str, incoming: Incoming) -> str:
    """The target of a redirect. It must be a URL that we fetch, and must not lead from https to http."""
    location = incoming.headers.get("location", "")
    try:
        following = canonical_url(urljoin(url, location)) if location else ""
    except (InvalidInput, ValueError):
        following = ""
    if not following:
        raise refused(f"{_host(url)} answered {incoming.status} with a redirect to nothing that can be fetched")
    if url.startswith("https:") and not following.startswith("https:"):
        raise refused(
            f"{_host(url)} redirects from https to http at {_host(following)}, where anyone could change the document"
        )
    return following


def _conditions(etag: str | None) -> dict[str, str]:
    """Headers that request the content only if it has changed."""
    if etag is not None and etag.startswith(_ETAG):
        return {"if-none-match": etag.removeprefix(_ETAG)}
    if etag is not None and etag.startswith(_MODIFIED):
        return {"if-modified-since": etag.removeprefix(_MODIFIED).partition(";")[0]}
    return {}


def _etag(incoming: Incoming, size: int) -> str | None:
    """The server's ETag, or its Last-Modified with the size. Values that are too long or unusual are ignored."""
    for header, prefix, suffix in (("etag", _ETAG, ""), ("last-modified", _MODIFIED, f";{size}")):
        value = incoming.headers.get(header, "").strip()
        if value and len(value) <= _HEADER_CHARACTERS_MAX and value.isascii() and value.isprintable():
            return f"{prefix}{value}{suffix}"
    return None


def _body(url: str, incoming: Incoming) -> AsyncIterator[bytes]:
    """The body; decompressed if the server compressed it although we asked it not to."""
    encoding = incoming.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return incoming.chunks()
    if encoding in ("gzip", "x-gzip"):
        return _unpacked(url, incoming)
    raise refused(f"{_host(url)} sends the encoding {encoding[:40]!r}, which was not requested")


async def _unpacked(url: str, incoming: Incoming) -> AsyncIterator[bytes]:
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        async with closing(incoming.chunks()) as chunks:
            async for chunk in chunks:
                while chunk:
                    # Decompress piece by piece, so that a small chunk cannot become gigabytes before the size check.
                    yield unpack.decompress(chunk, PIECE_BYTES)
                    chunk = unpack.unconsumed_tail
    except zlib.error:
        raise refused(f"{_host(url)} sends a body that does not match its encoding") from None
    if not unpack.eof:
        raise unavailable(f"{_host(url)} sent only a part of the document")


def _refusal(url: str, incoming: Incoming) -> OperationError:
    """The error for a status. It names only the host, because the URL may be signed."""
    message = f"{_host(url)} answered {incoming.status}"
    match incoming.status:
        case 404 | 410:
            return gone(f"{message}: the document")
        case 429:
            wait = retry_after_seconds(incoming.headers.get("retry-after"), now=time.time())
            return RateLimited(message, retry_after=wait, code="source_busy")
        case status if status >= 500 or status in _TRY_AGAIN or status == 304:
            return unavailable(message)
        case 401 | 403:
            return refused(f"{message}: the document is not public, and Batchwright sends no credentials")
        case _:
            return refused(f"{message} in place of a document")


def _name(url: str, incoming: Incoming, media_type: str | None) -> str:
    """The name that the server sends, or else the end of the last URL."""
    given = _given_name(incoming.headers.get("content-disposition", "")[:_HEADER_CHARACTERS_MAX])
    last = (given or unquote(urlsplit(url).path)).replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = shown_name(last)[-_NAME_CHARACTERS_MAX:].strip(". ") or _host(url)
    if PurePosixPath(name).suffix.lower().removeprefix(".") not in EXTENSIONS:
        name += _BY_MEDIA_TYPE.get(media_type or "", "")
    return name


def _given_name(disposition: str) -> str:
    """Decode only the charsets of the standard. Headers arrive as Latin-1, and many servers write UTF-8."""
    if found := _NAME_ENCODED.search(disposition):
        return unquote(found[2], encoding=found[1], errors="replace")
    if found := _NAME.search(disposition):
        text = (found[1] or found[2] or "").replace('\\"', '"')
        try:
            return text.encode("latin-1").decode()
        except UnicodeError:
            return text
    return ""


def _lost(url: str, error: NoAnswer) -> OperationError:
    if error.failure is Failure.UNSENDABLE:
        return Fatal(f"{_host(url)}: {error}", scope="item", code="invalid_uri")
    return unavailable(f"{_host(url)}: {error}")


def _private(url: str) -> Fatal:
    return refused(
        f"{_host(url)} is in a private network; to fetch from there, set private = true in [ingest]. Addresses where "
        "clouds keep the credentials of their machines are always refused"
    )


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
