"""The object store: streams in and out by key, with limits, checksums and retries, over a folder or a remote store.

>>> store = open_store(StorageSettings(url="s3://bucket/batchwright"), beside=folder)
>>> stored = await store.put("files/file-1", request.stream(), limit=200_000_000)
>>> async for chunk in store.get("files/file-1", start=1_000):
...     await send(chunk)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchwright.errors import ConfigurationError, NotFound, StorageUnavailable
from batchwright.storage.backend import Backend, Found
from batchwright.storage.contents import Contents, Source
from batchwright.storage.keys import checked, checked_prefix
from batchwright.storage.local import Local
from batchwright.storage.remote import SCHEMES, Remote, redacted
from batchwright.storage.retry import Counter, Retry
from batchwright.storage.settings import StorageSettings
from batchwright.telemetry.tracing import span

FOLDER = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored object: durable, and complete under its key."""

    key: str
    size: int
    sha256: str
    etag: str | None


class Store:
    """Objects by key. Any call may raise StorageUnavailable, StorageFull (both may pass) or StorageError (will not)."""

    def __init__(
        self,
        backend: Backend,
        settings: StorageSettings | None = None,
        *,
        counts: Counter | None = None,
        component: str = "worker",
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._backend = backend
        self._retry = Retry(settings or StorageSettings(), counts, component, pause)

    async def put(self, key: str, source: Source, *, limit: int | None = None) -> Stored:
        """Write the object, replacing any other; one over the limit raises TooLarge and leaves nothing.

        A stream that is longer than a part can be sent only once. To survive a failure in the middle, pass a callable
        that creates the stream.
        """
        checked(key)
        contents = Contents(source, limit)
        with _storing(key, contents):
            await contents.hold(self._backend.part_bytes)
            return await self._write(key, contents)

    async def put_file(self, key: str, path: Path) -> Stored:
        """Write a finished file, which must never change again: a folder links it instead of copying it."""
        contents = Contents(path)
        if not await asyncio.to_thread(path.is_file):
            raise NotFound(f"there is no file {path} to upload")
        with _storing(checked(key), contents):
            etag = await self._retry("put", lambda: self._backend.adopt(key, path))
            if etag is None:
                return await self._write(key, contents)
            await contents.measure()
        return Stored(key=key, size=contents.size, sha256=contents.sha256, etag=etag)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` up to, not including, `end`, a part at a time; each part is requested when needed."""
        with span("storage.Retrieve", attributes={"storage.key": key, "storage.bytes": 0}, current=False) as retrieving:
            found = await self.head(key)
            if found is None:
                raise NotFound(f"there is no object {key}")
            stop = found.size if end is None else min(end, found.size)
            first = start
            while start < stop:
                part = await self._part(key, start, min(stop, start + self._backend.part_bytes), found.etag)
                start += len(part)
                retrieving.set({"storage.bytes": start - first})
                yield part

    async def read(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer where the object ends."""
        return b"".join([part async for part in self.get(key, start, start + length)])

    async def head(self, key: str) -> Found | None:
        checked(key)
        return await self._retry("head", lambda: self._backend.head(key))

    async def delete(self, *keys: str) -> None:
        """Delete objects; missing ones count as deleted."""
        if keys:
            for key in keys:
                checked(key)
            with span("storage.Delete", attributes={"storage.key": keys[0], "storage.keys": len(keys)}):
                await self._retry("delete", lambda: self._backend.delete(keys))

    async def list(self, prefix: str = "", after: str | None = None) -> AsyncIterator[Found]:
        """Objects in a folder and below it, in the order of their keys, those after `after` only."""
        prefix, after = checked_prefix(prefix), after and checked(after)
        pages = self._backend.pages(prefix, after)
        while True:
            pages, page = await self._retry("list", _Page(self._backend, pages, prefix, after).turn)
            for found in page:
                yield found
            if not page:
                return
            after = page[-1].key

    def local_path(self, key: str) -> Path | None:
        """The path of the object, if the store is a local folder, whether or not it exists. Only for reading."""
        return self._backend.local_path(checked(key))

    @property
    def folder(self) -> Path | None:
        """The folder of the objects, if they are local files."""
        here = self._backend.local_path("x")
        return None if here is None else here.parent

    async def sweep(self, older_than_seconds: float = 86_400) -> int:
        """Remove incomplete objects that killed writers left in a folder; returns how many."""
        return await self._retry("sweep", lambda: self._backend.sweep(older_than_seconds))

    def __str__(self) -> str:
        """The location of the store, without secrets."""
        return str(self._backend)

    async def _write(self, key: str, contents: Contents) -> Stored:
        async def write() -> str | None:
            async with aclosing(contents.chunks()) as chunks:
                return await self._backend.write(key, chunks)

        etag = await self._retry("put", write, may_repeat=lambda: contents.repeatable)
        return Stored(key=key, size=contents.size, sha256=contents.sha256, etag=etag)

    async def _part(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        part = await self._retry("get", lambda: self._backend.read(key, start, end, etag))
        if len(part) != end - start:
            raise StorageUnavailable(f"{key} in {self}: requested {end - start} bytes and received {len(part)}")
        return part


@contextmanager
def _storing(key: str, contents: Contents) -> Iterator[None]:
    with span("storage.Store", attributes={"storage.key": key}) as storing:
        yield
        storing.set({"storage.bytes": contents.size})


class _Page:
    """Reads the next page of a listing; after a failure, the listing resumes after the last key seen."""

    def __init__(self, backend: Backend, pages: AsyncIterator[Sequence[Found]], prefix: str, after: str | None) -> None:
        self._again = functools.partial(backend.pages, prefix, after)
        self._pages = pages

    async def turn(self) -> tuple[AsyncIterator[Sequence[Found]], Sequence[Found]]:
        try:
            return self._pages, await anext(self._pages, None) or ()
        except StorageUnavailable:
            self._pages = self._again()
            raise


def open_store(
    settings: StorageSettings, *, beside: Path, counts: Counter | None = None, component: str = "worker"
) -> Store:
    """The store that the settings name, or the folder `files` in `beside`, where the embedded database is."""
    return Store(_backend(settings, beside), settings, counts=counts, component=component)


def _backend(settings: StorageSettings, beside: Path) -> Backend:
    if settings.url is None:
        return Local(beside / FOLDER)
    parts = urlsplit(settings.url)
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigurationError(
            f"storage.url {redacted(settings.url)} must be without user, password and query; "
            "credentials come from the environment, such as AWS_ACCESS_KEY_ID"
        )
    if parts.scheme == "file" and parts.netloc == "" and parts.path.startswith("/"):
        return Local(Path(unquote(parts.path)))
    if parts.scheme in SCHEMES and parts.netloc:
        return Remote.at(settings.url, settings)
    raise ConfigurationError(
        f"storage.url {redacted(settings.url)} is not supported: write s3://bucket/path, gs://bucket/path, "
        "az://account/container/path or file:///folder"
    )
