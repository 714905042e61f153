"""Buckets of the contract server, reached without HTTP."""

from datetime import UTC, datetime

from batchwright.providers.buckets import Bucket
from batchwright.storage.backend import Found


class Blobs:
    """One bucket of the server, with the interface of a bucket."""

    part_bytes = 5 * 1024 * 1024

    def __init__(self, world, root):
        self._world = world
        self._name = root.partition("://")[2]

    def __str__(self):
        return self._name

    async def write(self, key, chunks):
        data = b"".join([chunk async for chunk in chunks])
        return self._world.put_blob(self._name, key, data).md5

    async def read(self, key, start, end, etag):
        return self._world.blobs[self._name, key].data[start:end]

    async def head(self, key):
        blob = self._world.blobs.get((self._name, key))
        return None if blob is None else self._found(key, blob)

    async def delete(self, keys):
        for key in keys:
            self._world.blobs.pop((self._name, key), None)

    async def pages(self, prefix, after):
        blobs = sorted((name, blob) for (bucket, name), blob in self._world.blobs.items() if bucket == self._name)
        yield [self._found(name, blob) for name, blob in blobs if name.startswith(f"{prefix}/")]

    def _found(self, key, blob):
        return Found(key=key, size=len(blob.data), etag=blob.md5, modified_at=datetime.fromtimestamp(blob.at, UTC))


def use_server_buckets(world):
    """Let the tools of a conformance test use the server's buckets."""
    world.tools._open_bucket = lambda root: Bucket(Blobs(world.server.world, root))
