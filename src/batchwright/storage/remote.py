"""Objects in S3, Google Cloud Storage or Azure, through obstore with its own retries turned off."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit, urlunsplit

import obstore
from obstore import exceptions as refused
from obstore.store import from_url

from batchwright.errors import ConfigurationError, Conflict, NotFound, StorageError, StorageUnavailable
from batchwright.storage.backend import Found
from batchwright.storage.contents import gathered
from batchwright.storage.settings import StorageSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

SCHEMES = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"}
DELETE_MAX = 1_000
PAGE = 1_000
UPLOADS_AT_ONCE = 2
_ABORT_SECONDS = 10.0
_REASON_CHARACTERS_MAX = 300
_STATUS = re.compile(r"status code: (\d{3})[ \w-]*")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_URL = re.compile(r"\w+://[^\s'\"<>]+")
_PLAIN_GOOGLE = re.compile(r'"gcs_base_url"\s*:\s*"http://')
_NO_BUCKET = "NoSuchBucket"
_TRY_AGAIN = {408, 425, 429}


class Remote:
    """An object store, reached through obstore."""

    def __init__(self, store: ObjectStore, *, part_bytes: int, name: str) -> None:
        self._store = store
        self._name = name
        self.part_bytes = part_bytes

    @classmethod
    def at(cls, url: str, settings: StorageSettings) -> Self:
        """The store at a URL; sends no request yet."""
        try:
            store = from_url(url, client_options=_client(settings), retry_config=_NO_RETRIES)
        except (refused.BaseError, ValueError, TypeError) as error:
            raise ConfigurationError(f"storage.url {redacted(url)} cannot be used: {_reason(error)}") from None
        return cls(store, part_bytes=settings.part_bytes, name=redacted(url))

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> str | None:
        parts = gathered(chunks, self.part_bytes)
        first = await anext(parts, b"")
        if len(first) < self.part_bytes:
            with self._explained(key, writing=True):
                return (await obstore.put_async(self._store, key, first, use_multipart=False))["e_tag"]
        return await self._upload(key, first, parts)

    async def adopt(self, key: str, path: Path) -> str | None:
        return None

    async def read(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        with self._explained(key):
            options: obstore.GetOptions = {"range": (start, end)}
            if etag is not None:
                options["if_match"] = etag
            answer = await obstore.get_async(self._store, key, options=options)
            return bytes(await answer.bytes_async())

    async def head(self, key: str) -> Found | None:
        try:
            with self._explained(key):
                return _found(await obstore.head_async(self._store, key))
        except NotFound:
            return None

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_MAX):
            some = list(keys[start : start + DELETE_MAX])
            try:
                with self._explained(some[0]):
                    await obstore.delete_async(self._store, some)
            except NotFound:  # some stores fail if one object is gone, and then keep the others
                for key in some:
                    await self._delete(key)

    async def pages(self, prefix: str, after: str | None) -> AsyncIterator[Sequence[Found]]:
        with self._explained(prefix):
            async for page in obstore.list(self._store, prefix or None, offset=after, chunk_size=PAGE):
                yield [_found(meta) for meta in page]

    def local_path(self, key: str) -> Path | None:
        return None

    async def sweep(self, older_than_seconds: float) -> int:
        """obstore does not list unfinished uploads: a lifecycle rule of the bucket removes them."""
        return 0

    def __str__(self) -> str:
        return self._name

    async def _delete(self, key: str) -> None:
        try:
            with self._explained(key):
                await obstore.delete_async(self._store, key)
        except NotFound:
            return

    async def _upload(self, key: str, first: bytes, rest: AsyncIterator[bytes]) -> str | None:
        """Upload in parts. obstore aborts an upload if its source fails, but not if the upload is cancelled.

        So it runs in its own task and reads its parts from a pipe, which fails if this call ends early.
        """
        pipe = _Pipe()
        upload = asyncio.ensure_future(self._upload_from(pipe, key))
        upload.add_done_callback(lambda _: pipe.release_sender())
        try:
            await pipe.send(first)
            del first
            async for part in rest:
                if upload.done():
                    break
                await pipe.send(part)
            if not upload.done():
                await pipe.send(None)
            with self._explained(key, writing=True):
                return await asyncio.shield(upload)
        finally:
            await _end(upload, pipe)

    async def _upload_from(self, pipe: _Pipe, key: str) -> str | None:
        size, at_once = self.part_bytes, UPLOADS_AT_ONCE
        return (await obstore.put_async(self._store, key, pipe, chunk_size=size, max_concurrency=at_once))["e_tag"]

    @contextmanager
    def _explained(self, key: str, *, writing: bool = False) -> Iterator[None]:
        """Translate obstore's errors, whose texts contain whole answers: keep only a reason without secrets."""
        try:
            yield
        except FileNotFoundError as error:
            if writing or _NO_BUCKET in str(error):
                raise self._missing(error) from None
            raise NotFound(f"there is no object {key}") from None
        except (refused.PreconditionError, refused.NotModifiedError):
            raise Conflict(f"{key} was replaced while it was read: read it again from its beginning") from None
        except (refused.PermissionDeniedError, refused.UnauthenticatedError) as error:
            raise StorageError(f"{self._name} refuses our credentials for {key}: {_reason(error)}") from None
        except refused.GenericError as error:
            if _NO_BUCKET in str(error):
                raise self._missing(error) from None
            kind = StorageUnavailable if _may_be_transient(error) else StorageError
            raise kind(f"{key or 'everything'} in {self._name}: {_reason(error)}") from None
        except (refused.BaseError, OSError, TimeoutError) as error:
            raise StorageError(f"{key} in {self._name}: {_reason(error)}") from None

    def _missing(self, error: Exception) -> StorageError:
        return StorageError(f"{self._name} does not exist ({_reason(error)}); create it first")


class _Pipe:
    """Passes one part at a time to an upload; None is the end, an error aborts it."""

    def __init__(self) -> None:
        self._parts = asyncio.Queue[bytes | Exception | None](1)

    async def send(self, part: bytes | Exception | None) -> None:
        await self._parts.put(part)

    def release_sender(self) -> None:
        """Parts are no longer read: release a waiting sender."""
        while not self._parts.empty():
            self._parts.get_nowait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        part = await self._parts.get()
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        return part


async def _end(upload: asyncio.Future[str | None], pipe: _Pipe) -> None:
    """Abort an unfinished upload, so that the store discards its parts; a store that is unavailable may keep them."""
    if not upload.done():
        pipe.release_sender()
        await pipe.send(StorageError("the upload was aborted"))
        await asyncio.wait({upload}, timeout=_ABORT_SECONDS)
        upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)


def redacted(url: str) -> str:
    """A URL without user, password and query, for messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _client(settings: StorageSettings) -> ClientConfig:
    return {
        "allow_http": _is_http_configured(),
        "connect_timeout": timedelta(seconds=settings.connect_timeout_seconds),
        "timeout": timedelta(seconds=settings.timeout_seconds),
    }


def _is_http_configured() -> bool:
    """Whether the environment names an endpoint without TLS: we take that as intended."""
    amazon = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    google = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    return amazon.startswith("http://") or _PLAIN_GOOGLE.search(google) is not None


_NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}


def _found(meta: obstore.ObjectMeta) -> Found:
    return Found(key=meta["path"], size=meta["size"], etag=meta["e_tag"], modified_at=meta["last_modified"])


def _may_be_transient(error: Exception) -> bool:
    """Whether a retry may help: after a lost connection, a timeout or the store's own error, not after a refusal."""
    status = _STATUS.search(str(error))
    return status is None or int(status[1]) >= 500 or int(status[1]) in _TRY_AGAIN


def _reason(error: Exception) -> str:
    """The status and the store's code for it, or the first line; never a body, a query or a password."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return status[0].removeprefix("status code: ").strip() + (f" ({code[1]})" if code else "")
    first = text.partition("\n")[0]
    return _URL.sub(lambda url: redacted(url[0]), first)[:_REASON_CHARACTERS_MAX]
