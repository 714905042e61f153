"""Documents in buckets of S3, Google Cloud Storage and Azure, with the credentials of the environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from batchwright.errors import Conflict, Fatal, OperationError
from batchwright.ingest.sources.listing import Listed, Listing, Reason, shown_name
from batchwright.ingest.sources.parse import ObjectSource
from batchwright.ingest.sources.roots import Roots
from batchwright.ingest.sources.settings import Rules
from batchwright.ingest.sources.sink import About, NotModified, Sink, changed, gone, refused
from batchwright.providers.buckets import Bucket, open_bucket, split_uri
from batchwright.storage.backend import Found

_BUCKETS_MAX = 100
_UNNAMEABLE = "invalid path"
"""obstore's error for a key with an empty part, such as `a//b`. It then lists nothing of that page."""


class Objects:
    """Reads the buckets of all runs of a process."""

    def __init__(self, open: Callable[[str], Bucket] = open_bucket) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._open = open

    async def list(self, source: ObjectSource, rules: Rules, listing: Listing) -> AsyncIterator[Listed]:
        """The object with this name, and all in the folder of that name. A page that cannot be read is a gap."""
        bucket = self._bucket(source.root)
        seen = 0
        try:
            if source.prefix and not source.prefix.endswith("/"):
                itself = await bucket.head(source.prefix)
                if itself is not None:
                    seen += 1
                    yield _listed(source, itself, itself.key.rpartition("/")[2])
            async for found in bucket.list(source.prefix):
                seen += 1
                name = found.key.removeprefix(source.prefix.rstrip("/")).lstrip("/")
                if name and _is_taken(found, name, rules, listing):
                    yield _listed(source, found, name)
        except OperationError as error:
            if isinstance(error, Fatal) and _UNNAMEABLE not in str(error):
                raise
            listing.skip(source.uri, Reason.UNREADABLE, f"only a part of it could be listed: {error}")
        if seen == 0:
            listing.skip(
                source.uri, Reason.UNREADABLE, "there is no object or folder with this name; check the spelling"
            )

    async def fetch(self, uri: str, roots: Roots, sink: Sink, etag: str | None) -> About | NotModified:
        if not roots.holds_object(uri):
            raise refused(f"{shown_name(uri)} may not be read: it is outside the roots of its run")
        root, key = split_uri(uri)
        bucket = self._bucket(root)
        found = await bucket.head(key)
        if found is None:
            raise gone(shown_name(uri))
        if etag is not None and etag == _etag(found):
            return NotModified(etag=etag)
        sink.check_size(found.size)
        try:
            await sink.pour(bucket.read(key, found))
        except Conflict:
            raise changed(shown_name(uri)) from None
        except Fatal as error:
            raise gone(shown_name(uri)) if error.code == "input_not_found" else error from None
        return About(etag=_etag(found), media_type=None, name=shown_name(key.rpartition("/")[2]))

    def _bucket(self, root: str) -> Bucket:
        if root not in self._buckets:
            if len(self._buckets) >= _BUCKETS_MAX:
                self._buckets.clear()
            self._buckets[root] = self._open(root)
        return self._buckets[root]


def _is_taken(found: Found, name: str, rules: Rules, listing: Listing) -> bool:
    """Whether to read the object, by the same rules as for files; folders are only parts of names here."""
    if not rules.settings.hidden and any(part.startswith(".") for part in name.split("/")):
        listing.skip(shown_name(name), Reason.HIDDEN, "its name begins with a dot")
    elif refusal := rules.patterns.refusal(name):
        listing.skip(shown_name(name), *refusal)
    elif found.size > rules.settings.bytes_max:
        message = f"it has {found.size:,} bytes; the limit is {rules.settings.bytes_max:,} (bytes_max)"
        listing.skip(shown_name(name), Reason.TOO_LARGE, message)
    else:
        return True
    return False


def _listed(source: ObjectSource, found: Found, name: str) -> Listed:
    shown = shown_name(name)
    folder = shown.rpartition("/")[0]
    metadata = {"bucket": source.root} | ({"folder": folder} if folder else {})
    return Listed(uri=f"{source.root}/{found.key}", name=shown, etag=_etag(found), size=found.size, metadata=metadata)


def _etag(found: Found) -> str:
    return found.etag or f"{found.modified_at.isoformat()};{found.size}"
