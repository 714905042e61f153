"""Tests what a store can do: some stores lack abilities that they claim to have."""

from __future__ import annotations

import contextlib
import os
import uuid

from batchwright.errors import StorageError
from batchwright.storage.store import Store

FOLDER = "probes"
_BYTES = 1024
_RANGE = 100, 200


async def probe(store: Store) -> None:
    """Write an object, read a range of it, list it and delete it; StorageError says which step does not work."""
    key, data = f"{FOLDER}/{uuid.uuid4().hex}", os.urandom(_BYTES)
    start, end = _RANGE
    await store.put(key, data)
    try:
        if await store.read(key, start, end - start) != data[start:end]:
            raise StorageError(
                f"{store} does not serve ranges: bytes {start} to {end} of an object are not those that were written"
            )
        if key not in [found.key async for found in store.list(FOLDER)]:
            raise StorageError(f"{store} does not list an object that was just written")
    finally:
        with contextlib.suppress(StorageError):
            await store.delete(key)
    if await store.head(key) is not None:
        raise StorageError(f"{store} does not delete: an object is still there after it was deleted")
