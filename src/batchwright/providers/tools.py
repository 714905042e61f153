"""What adapters get from their process: HTTP, secrets by reference, bytes of inputs, buckets and a clock."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from batchwright.errors import ConfigurationError, Fatal, Transient
from batchwright.inference.addresses import is_private, is_special, resolve
from batchwright.inference.gateway import Key
from batchwright.inference.http import Http
from batchwright.providers.buckets import SCHEMES, Bucket, open_bucket, split_uri
from batchwright.providers.signing import sign_uri

if TYPE_CHECKING:
    from batchwright.providers.contract import Input

Chunks = AsyncIterator[bytes]


class Secret:
    """A credential by reference. It is read when it is needed, so it can be replaced while the process runs."""

    def __init__(self, what: str, file: Path | None, variable: str | None, environment: Mapping[str, str]) -> None:
        self._key = Key(what, file, variable, environment)
        self._what = what

    def __repr__(self) -> str:
        return f"Secret({self._key.origin})"

    @property
    def missing(self) -> str | None:
        """Where the credential should be, as text; None if it can be read."""
        try:
            return None if self._key.text(time.monotonic()) is not None else f"{self._what} is not configured"
        except ConfigurationError as error:
            return str(error)

    def text(self) -> str:
        """The credential. If it is missing, all work that needs it stops."""
        if (missing := self.missing) is not None:
            raise Fatal(missing, scope="credential", code="credentials_missing")
        text = self._key.text(time.monotonic())
        assert text is not None
        return text


class AdapterTools:
    """The tools that all adapters of a process share."""

    def __init__(
        self,
        http: Http,
        *,
        open_stored: Callable[[str], Chunks] | None = None,
        place_of_stored: Callable[[str], str | None] = lambda _: None,
        bucket: Callable[[str], Bucket] = open_bucket,
        environment: Mapping[str, str] | None = None,
        may_fetch_private: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.http = http
        self.environment = os.environ if environment is None else environment
        self.now = now
        self.sign: Callable[[str, float], Awaitable[str]] = sign_uri
        """Create a URL from which anybody can read an object of a bucket for this number of seconds."""
        self._open_stored = open_stored
        self._place_of_stored = place_of_stored
        self._open_bucket = bucket
        self._buckets: dict[str, Bucket] = {}
        self._is_refused = is_special if may_fetch_private else is_private

    def secret(self, what: str, *, file: Path | None = None, variable: str | None = None) -> Secret:
        return Secret(what, file, variable, self.environment)

    def bucket(self, root: str) -> Bucket:
        """The bucket at `gs://name`, `s3://name` or `az://account/container`."""
        if root not in self._buckets:
            self._buckets[root] = self._open_bucket(root)
        return self._buckets[root]

    def place(self, input: Input) -> str | None:
        """The `gs:`, `s3:` or `az:` address of an input, including stored files; None if it has none."""
        scheme, _, rest = input.uri.partition(":")
        if scheme == "file":
            return self._place_of_stored(rest)
        return input.uri if scheme in SCHEMES else None

    def read(self, input: Input) -> Chunks:
        """The bytes of an input, from wherever it is."""
        scheme, _, rest = input.uri.partition(":")
        if scheme == "file":
            if self._open_stored is None:
                raise Fatal("this process has no access to stored files", scope="item", code="input_not_found")
            return self._open_stored(rest)
        if scheme in SCHEMES:
            root, key = split_uri(input.uri)
            return self.bucket(root).read(key)
        return self._fetch(input.uri)

    async def size(self, input: Input) -> int:
        """Size of an input in bytes. If the size is unknown, the input is read once to measure it."""
        if input.bytes is not None:
            return input.bytes
        if input.uri.partition(":")[0] in SCHEMES:
            root, key = split_uri(input.uri)
            if (size := await self.bucket(root).size(key)) is not None:
                return size
        measured = 0
        async for chunk in self.read(input):
            measured += len(chunk)
        return measured

    async def _fetch(self, url: str) -> Chunks:
        """Fetch a file by URL, without credentials, and never from inside our own network."""
        await self._refuse_private_names(url)
        async with self.http.open("GET", url) as incoming:
            if incoming.address is not None and self._is_refused(incoming.address):
                raise _private(url)
            if not incoming.is_ok:
                raise _not_fetched(url, incoming.status)
            async for chunk in incoming.chunks():
                yield chunk

    async def _refuse_private_names(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
            raise Fatal("the URL of an input is invalid", scope="item", code="invalid_uri")
        try:
            found = await resolve(parts.hostname)
        except OSError:
            raise Transient(f"the name {parts.hostname} is unknown", code="input_unavailable") from None
        if any(map(self._is_refused, found)):
            raise _private(url)


def _private(url: str) -> Fatal:
    return Fatal(
        f"{urlsplit(url).hostname} is in a private network; to fetch inputs from there, set "
        "tasks.fetch_private = true. Addresses where clouds keep the credentials of their machines are always refused",
        scope="item",
        code="input_refused",
    )


def _not_fetched(url: str, status: int) -> Fatal | Transient:
    """The message names only the host, because the whole URL may be signed."""
    message = f"{urlsplit(url).hostname} answered {status} for an input"
    if status in (408, 425, 429) or status >= 500:
        return Transient(message, code="input_unavailable")
    return Fatal(message, scope="item", code="input_not_found")
