"""Parse what users name as a source, and bring addresses into their canonical form."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit

from batchwright.errors import InvalidInput

TEXT_CHARACTERS_MAX = 8_000
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_BUCKETS = {"s3": 1, "gs": 1, "az": 2}
"""Number of names that make up a bucket: for Azure, an account and a container."""
_UNSENDABLE = re.compile(r"[\x00-\x20\x7f\\]")
_PATH_SAFE = "/%:@!$&'()*+,;=~-._[]|"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """A file or a folder of this machine: `./papers`, `file:///data/papers`."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSource:
    """An object or a folder of a bucket: `s3://bucket/2024` is `2024/report.pdf`, but not `2024-report.pdf`."""

    root: str
    """The bucket: `s3://bucket`, `gs://bucket` or `az://account/container`."""
    prefix: str

    @property
    def uri(self) -> str:
        return f"{self.root}/{self.prefix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlList:
    """A file with one URL on each line: `@urls.txt`."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlSource:
    """One document by its URL."""

    url: str


Source = FileSource | ObjectSource | UrlList | UrlSource


def parse_source(text: str) -> Source:
    """Raises InvalidInput for a text that does not name a source.

    >>> parse_source("s3://bucket/2024/")
    ObjectSource(root='s3://bucket', prefix='2024/')
    """
    if not text.strip() or len(text) > TEXT_CHARACTERS_MAX or "\x00" in text or not _is_text(text, "surrogateescape"):
        raise _unknown(text, f"it is empty, longer than {TEXT_CHARACTERS_MAX} characters or not text")
    if text.startswith("@"):
        return UrlList(path=_absolute(text[1:]))
    scheme = _SCHEME.match(text)
    if scheme is None:
        return FileSource(path=_absolute(text))
    match scheme[1].lower():
        case "file":
            return FileSource(path=path_of(text))
        case "http" | "https":
            return UrlSource(url=canonical_url(text))
        case "s3" | "gs" | "az":
            return _parse_object(text)
        case other:
            raise _unknown(text, f"the scheme {other}: is not supported")


def canonical_url(text: str) -> str:
    """A URL without a fragment, in ASCII, with its host in lower case, so that a document has only one address."""
    text = text.strip()
    try:
        text.encode()
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode()
    except (ValueError, UnicodeError):
        raise InvalidInput("a URL has an invalid host or port", param="sources") from None
    if parts.scheme not in _PORTS or not host or port == 0 or _UNSENDABLE.search(text.replace(" ", "")) or "%" in host:
        raise InvalidInput(f"{_server_of(text)} is not a URL; write it like https://example.com/a.pdf", param="sources")
    if "@" in parts.netloc:
        raise InvalidInput(
            "a URL contains a user or password, which would be stored with it; leave them out", param="sources"
        )
    if len(text) > TEXT_CHARACTERS_MAX:
        raise InvalidInput(f"a URL of {host} is longer than {TEXT_CHARACTERS_MAX} characters", param="sources")
    server = f"[{host}]" if ":" in host else host
    if port not in (None, _PORTS[parts.scheme]):
        server += f":{port}"
    query = f"?{quote(parts.query, safe=_PATH_SAFE + '?')}" if parts.query else ""
    return f"{parts.scheme}://{server}{quote(parts.path, safe=_PATH_SAFE) or '/'}{query}"


def uri_of(path: str) -> str:
    """The URI of a file; bytes that are not valid UTF-8 are kept."""
    return "file://" + quote(os.fsencode(path), safe="/~-._")


def path_of(uri: str) -> Path:
    """The file of a URI. `?` and `#` have no special meaning here."""
    host, slash, rest = uri.partition("://")[2].partition("/")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(slash + rest)))
    if host not in ("", "localhost") or not slash or "\x00" in path:
        raise _unknown(uri, "a file's address has an absolute path and no host, such as file:///data/papers")
    return _absolute(path)


def _absolute(text: str) -> Path:
    """Resolve `..`, but not links: a folder keeps its name when a link to it gets a new target."""
    if not text or "\x00" in text:
        raise _unknown(text, "it does not name a file")
    return Path(os.path.abspath(text))  # noqa: PTH100 - Path.resolve would follow links, Path.absolute keeps `..`


def _parse_object(text: str) -> ObjectSource:
    scheme, _, rest = text.partition("://")
    count = _BUCKETS[scheme.lower()]
    *names, prefix = [*rest.split("/", count), ""] if rest.count("/") < count else rest.split("/", count)
    is_text = _is_text(text, "strict")
    if not is_text or len(names) != count or not all(names) or any(part in (".", "..") for part in prefix.split("/")):
        example = "az://account/container/prefix" if count > 1 else f"{scheme}://bucket/prefix"
        raise _unknown(text, f"write it like {example}")
    return ObjectSource(root=f"{scheme.lower()}://{'/'.join(names)}", prefix=prefix.lstrip("/"))


def _is_text(text: str, errors: str) -> bool:
    """Names of files may contain invalid UTF-8; names of objects may not."""
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return True


def _server_of(text: str) -> str:
    """The part of a URL that is safe to show: paths and queries may contain keys."""
    found = re.match(r"https?://[^/?#@\s]{1,100}", text)
    return repr(found[0] if found and "@" not in text else text[:20])


def _unknown(text: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"{text[:80]!r} is not a source: {why}. Use a folder, a file, https://…, @urls.txt or s3://bucket/prefix",
        param="sources",
    )
