"""One interface to all kinds of sources: list and fetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never
from urllib.parse import unquote, urlsplit

from batchwright.errors import Fatal, InvalidInput, Transient
from batchwright.ingest.sources.folders import Files
from batchwright.ingest.sources.listing import Listed, Listing, Reason, shown_name
from batchwright.ingest.sources.parse import (
    FileSource,
    ObjectSource,
    Source,
    UrlList,
    UrlSource,
    canonical_url,
    parse_source,
)
from batchwright.ingest.sources.patterns import Patterns
from batchwright.ingest.sources.roots import Roots
from batchwright.ingest.sources.settings import FetchSettings, Rules
from batchwright.ingest.sources.sink import About, Fetched, NotModified, Sink

if TYPE_CHECKING:
    from batchwright.inference.http import Http
    from batchwright.ingest.sources.objects import Objects
    from batchwright.ingest.sources.web import Web

SOURCES_MAX = 10_000
LIST_BYTES_MAX = 16_000_000


class Sources:
    """Created once per process. The caller closes an `http` client that it passes."""

    def __init__(
        self,
        settings: FetchSettings,
        http: Http | None = None,
        *,
        objects: Objects | None = None,
        web: Web | None = None,
    ) -> None:
        self._files = Files()
        self._http = http
        self._objects = objects
        self._own_http: Http | None = None
        self._settings = settings
        self._web = web

    def list(
        self,
        sources: Sequence[str],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        roots: Sequence[str] | None = None,
    ) -> Listing:
        """List the sources. Raises InvalidInput at once for sources that are malformed or outside the roots.

        Patterns and roots replace those of the settings. The CLI passes `local_roots(sources)`: its users may read
        whatever it can read. A run stores the roots of its listing and uses them for its fetches. Patterns select from
        folders and buckets; a file or URL that the user names is always included.
        """
        if not 0 < len(sources) <= SOURCES_MAX:
            raise InvalidInput(f"there are {len(sources)} sources; use 1 to {SOURCES_MAX}", param="sources")
        settings = self._settings
        rules = Rules(
            patterns=Patterns(
                settings.include if include is None else include, settings.exclude if exclude is None else exclude
            ),
            roots=Roots(settings.roots if roots is None else roots),
            settings=settings,
        )
        parsed = [parse_source(source) for source in sources]
        for text, source in zip(sources, parsed, strict=True):
            rules.roots.check(source, text)
        return Listing(lambda listing: self._list_all(parsed, rules, listing), settings.documents_max)

    async def fetch(
        self, uri: str, into: Path, *, etag: str | None = None, roots: Sequence[str] | None = None
    ) -> Fetched | NotModified:
        """Write the document to the file `into`. The file appears only when it is complete; only our user can read it.

        Given the `etag` of an earlier fetch or listing, returns NotModified if the content is still the same.
        """
        try:
            source = parse_source(uri)
            allowed = Roots(self._settings.roots if roots is None else roots)
        except InvalidInput as error:
            raise Fatal(str(error), scope="item", code="invalid_uri") from None
        try:
            async with asyncio.timeout(self._settings.seconds):
                with Sink(into, self._settings.bytes_max) as sink:
                    about = await self._fetch(source, allowed, sink, etag)
                    return about if isinstance(about, NotModified) else sink.finish(about)
        except TimeoutError:
            raise Transient(
                f"the document did not arrive within {self._settings.seconds:g} s; raise `seconds` in [ingest] if it "
                "may take longer",
                code="source_slow",
            ) from None

    async def close(self) -> None:
        self._files.close()
        if self._own_http is not None:
            http, self._own_http = self._own_http, None
            await http.close()

    async def _list_all(self, sources: Sequence[Source], rules: Rules, listing: Listing) -> AsyncIterator[Listed]:
        for source in sources:
            async for listed in self._list(source, rules, listing):
                yield listed

    def _list(self, source: Source, rules: Rules, listing: Listing) -> AsyncIterator[Listed]:
        match source:
            case FileSource():
                return self._files.list(source.path, rules, listing)
            case ObjectSource():
                return self._bucket_objects().list(source, rules, listing)
            case UrlList():
                return self._list_urls(source.path, rules, listing)
            case UrlSource():
                return _once(_listed_url(source.url))
            case _:
                assert_never(source)

    async def _fetch(self, source: Source, roots: Roots, sink: Sink, etag: str | None) -> About | NotModified:
        match source:
            case FileSource():
                return await self._files.fetch(source.path, roots, sink, etag)
            case ObjectSource():
                return await self._bucket_objects().fetch(source.uri, roots, sink, etag)
            case UrlSource():
                return await self._urls().fetch(source.url, sink, etag)
            case UrlList():
                raise Fatal("a list of URLs is not a document", scope="item", code="invalid_uri")
            case _:
                assert_never(source)

    async def _list_urls(self, path: Path, rules: Rules, listing: Listing) -> AsyncIterator[Listed]:
        """One URL on each line. A `#` at the start of a line, or after a space, begins a comment."""
        data = await self._files.read(path, rules.roots, LIST_BYTES_MAX)
        for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
            text = line.partition(" #")[0].strip()
            if not text or text.startswith("#"):
                continue
            try:
                listed = _listed_url(canonical_url(text))
            except InvalidInput as error:
                listing.skip(f"{shown_name(path.name)}:{number}", Reason.BAD_LINE, f"line {number}: {error}")
            else:
                yield listed

    def _urls(self) -> Web:
        from batchwright.inference.http import Http
        from batchwright.ingest.sources.web import Web

        if self._web is None:
            if self._http is None:
                self._http = self._own_http = Http()
            self._web = Web(self._http, self._settings)
        return self._web

    def _bucket_objects(self) -> Objects:
        from batchwright.ingest.sources.objects import Objects

        if self._objects is None:
            self._objects = Objects()
        return self._objects


async def _once(listed: Listed) -> AsyncIterator[Listed]:
    yield listed


def _listed_url(url: str) -> Listed:
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = shown_name(unquote(f"{host}{parts.path}", errors="surrogateescape")).rstrip("/")
    return Listed(uri=url, name=name, etag=None, size=None, metadata={"host": host})
