"""Buckets of users and of providers: objects by any key, with the errors of operations.

Our own object store accepts only keys that we created. Here users and providers choose the keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchwright.errors import Fatal, NotFound, StorageError, StorageFull, StorageUnavailable, Transient
from batchwright.storage.backend import Backend, Found
from batchwright.storage.local import Local
from batchwright.storage.remote import Remote
from batchwright.storage.retry import Retry
from batchwright.storage.settings import StorageSettings

Chunks = AsyncIterator[bytes]
SCHEMES = frozenset({"gs", "s3", "az"})
_SETTINGS = StorageSettings(retry_seconds_max=10.0)


class Bucket:
    """One bucket: `gs://name`, `s3://name` or `az://account/container`; or `file:///folder`, which acts as one."""

    def __init__(self, backend: Backend, settings: StorageSettings = _SETTINGS) -> None:
        self._backend = backend
        self._retry = Retry(settings, None, "provider")

    def __str__(self) -> str:
        return str(self._backend)

    async def head(self, key: str) -> Found | None:
        """The object as the store describes it; None if there is none."""
        with _translate_errors():
            return await self._retry("head", lambda: self._backend.head(key))

    async def size(self, key: str) -> int | None:
        """Bytes of the object; None if there is none."""
        found = await self.head(key)
        return None if found is None else found.size

    async def read(self, key: str, found: Found | None = None) -> Chunks:
        """Stream the object. A missing object is a failed input; an object that differs from `found` is a Conflict."""
        found = found or await self.head(key)
        if found is None:
            raise Fatal(f"there is no object {key} in {self}", scope="item", code="input_not_found")
        start = 0
        while start < found.size:
            end = min(found.size, start + self._backend.part_bytes)
            with _translate_errors():
                part = await self._part(key, start, end, found.etag)
            if len(part) != end - start:
                raise Transient(f"{key} in {self} is shorter than it was", code="length_changed")
            start = end
            yield part

    async def write(self, key: str, open: Callable[[], Chunks]) -> None:
        """Write the object, replacing any existing one."""
        with _translate_errors():
            await self._retry("put", lambda: self._backend.write(key, open()))

    async def list(self, prefix: str) -> AsyncIterator[Found]:
        """Objects in a folder and below it, in the order of their keys; a page that fails is requested again."""
        after: str | None = None
        pages: AsyncIterator[Sequence[Found]] | None = None

        async def next_page() -> Sequence[Found]:
            nonlocal pages
            pages = pages or self._backend.pages(prefix.removesuffix("/"), after)
            try:
                return await anext(pages, None) or ()
            except StorageError:
                pages = None
                raise

        while True:
            with _translate_errors():
                page = await self._retry("list", next_page)
            if not page:
                return
            for found in page:
                yield found
            after = page[-1].key

    async def delete(self, *keys: str) -> None:
        """Missing objects count as deleted."""
        if keys:
            with _translate_errors():
                await self._retry("delete", lambda: self._backend.delete(keys))

    async def _part(self, key: str, start: int, end: int, etag: str | None) -> bytes:
        return await self._retry("get", lambda: self._backend.read(key, start, end, etag))


def open_bucket(root: str) -> Bucket:
    parts = urlsplit(root)
    if parts.scheme == "file":
        return Bucket(Local(Path(unquote(parts.path))))
    return Bucket(Remote.at(address_of(root), _SETTINGS))


def address_of(root: str) -> str:
    """The address for obstore, which would mistake the account of an `az:` bucket for its container.

    >>> address_of("az://account/container")
    'https://account.blob.core.windows.net/container'
    """
    scheme, _, names = root.partition("://")
    if scheme != "az":
        return root
    account, _, container = names.partition("/")
    return f"https://{account}.blob.core.windows.net/{container}"


def split_uri(uri: str) -> tuple[str, str]:
    """The bucket and the key of an object.

    >>> split_uri("gs://bucket/a/b.wav")
    ('gs://bucket', 'a/b.wav')
    >>> split_uri("az://account/container/b.wav")
    ('az://account/container', 'b.wav')
    """
    scheme, _, rest = uri.partition("://")
    names = rest.split("/", 2 if scheme == "az" else 1)
    if scheme not in SCHEMES or len(names) < (3 if scheme == "az" else 2) or not all(names):
        raise Fatal(f"{uri[:200]!r} does not name an object of a bucket", scope="item", code="invalid_uri")
    return f"{scheme}://{'/'.join(names[:-1])}", names[-1]


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Translates errors of storage into errors of operations."""
    try:
        yield
    except (StorageUnavailable, StorageFull) as error:
        raise Transient(str(error), code="storage_unavailable") from None
    except NotFound as error:
        raise Fatal(str(error), scope="item", code="input_not_found") from None
    except StorageError as error:
        raise Fatal(str(error), scope="credential", code="storage_refused") from None
