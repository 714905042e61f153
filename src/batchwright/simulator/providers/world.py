"""What all protocols share: the clock, jobs, files, buckets with signed URLs, and the base class of protocols."""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from batchwright.errors import ConfigurationError
from batchwright.simulator.answers import Author
from batchwright.simulator.providers.faults import Faults
from batchwright.simulator.providers.jobs import Clock, Item, Job
from batchwright.simulator.providers.wire import OCTETS, Answer, Call, Refused

REFUSED_KEY = "wrong"
"""Every provider refuses a credential that contains this word."""
_PLACE = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """How the providers behave."""

    api_key: str | None = None
    """The only accepted credential; by default any, unless it contains the word `wrong`."""
    body_bytes_max: int = 1 << 30
    """Maximum size of a request's body."""
    cancel_seconds: float = 10.0
    """How long a job stays in cancelling."""
    faults: Sequence[str] = ()
    """Rules by which requests and jobs fail, such as `drop:route=openai.create:times=1`."""
    is_google_speech_cancellable: bool = False
    """Whether Google Speech carries out a cancel; the real service does not implement it."""
    page_max: int = 1000
    """Maximum page size of a list; a small one makes clients fetch several pages."""
    queue_seconds: float = 5.0
    """How long a job waits before it runs."""
    run_seconds: float = 60.0
    """How long it runs."""
    seed: int = 0
    """Equal seeds give equal answers."""
    signed_seconds: float = 12 * 3600.0
    """How long a signed URL works."""
    speed: float = 1.0
    """Seconds of the server's clock per real second; at 0 it moves only on request."""
    start: float | None = None
    """The server's time at the start; by default the current time."""

    def __post_init__(self) -> None:
        for name in ("cancel_seconds", "queue_seconds", "run_seconds", "speed"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigurationError(f"{name} is {value}, but must be 0 or more")
        if self.page_max < 1:
            raise ConfigurationError(f"page_max is {self.page_max}, but must be 1 or more")


@dataclass(frozen=True, slots=True)
class Blob:
    """An object in a bucket."""

    data: bytes
    type: str
    at: float
    generation: int

    @property
    def md5(self) -> str:
        return hashlib.md5(self.data, usedforsecurity=False).hexdigest()


@dataclass(slots=True, kw_only=True)
class File:
    """A file that was uploaded to a provider, or that the provider wrote."""

    id: str
    provider: str
    filename: str
    purpose: str
    data: bytes
    type: str
    created_at: float


@dataclass
class World:
    """The whole state of the server."""

    settings: ProviderSettings
    clock: Clock
    faults: Faults
    url: str = ""
    signed_url: str = ""
    blobs: dict[tuple[str, str], Blob] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    _boot: str = field(default_factory=lambda: secrets.token_hex(4))
    _number: int = 0

    @functools.cached_property
    def author(self) -> Author:
        """Writes the answers that are not an echo; creating it takes a while."""
        return Author(self.settings.seed)

    def now(self) -> float:
        return self.clock.now()

    def next_id(self, prefix: str) -> str:
        """An id that is unique across restarts, so that no client finds another's job under an old id."""
        self._number += 1
        return f"{prefix}{self._boot}{self._number:08x}"

    def make_job(self, provider: str, prefix: str, trace: str, items: Sequence[Item], **values: Any) -> Job:
        now, settings = self.now(), self.settings
        job = Job(
            id=self.next_id(prefix),
            provider=provider,
            number=self._number,
            trace=trace,
            created_at=now,
            items=items,
            queue_seconds=settings.queue_seconds,
            run_seconds=settings.run_seconds,
            cancel_seconds=settings.cancel_seconds,
            faults=self.faults.of_job(provider, trace),
            **{"begun_at": now, **values},
        )
        self.jobs[job.id] = job
        return job

    def publish(self) -> None:
        """Write the results of jobs that have ended into their buckets."""
        now = self.now()
        for job in self.jobs.values():
            if job.publish is not None and job.stage(now).is_end:
                write, job.publish = job.publish, None
                write(job)

    def job(self, provider: str, id: str) -> Job:
        job = self.jobs.get(id)
        if job is None or job.provider != provider:
            raise Refused(404, f"there is no job {id!r}")
        return job

    def listed(self, provider: str) -> list[Job]:
        """The provider's jobs that lists show by now, newest first."""
        now = self.now()
        return [one for one in reversed(self.jobs.values()) if one.provider == provider and one.listed_at <= now]

    def add_file(self, provider: str, id: str, filename: str, purpose: str, data: bytes, type: str = OCTETS) -> File:
        made = File(
            id=id, provider=provider, filename=filename, purpose=purpose, data=data, type=type, created_at=self.now()
        )
        self.files[id] = made
        return made

    def file(self, provider: str, id: str) -> File:
        found = self.files.get(id)
        if found is None or found.provider != provider:
            raise Refused(404, f"there is no file {id!r}")
        return found

    def put_blob(self, bucket: str, name: str, data: bytes, type: str = OCTETS) -> Blob:
        self._number += 1
        blob = self.blobs[bucket, name] = Blob(data, type, self.now(), int(self.now() * 1e6) + self._number)
        return blob

    def object_at(self, uri: str) -> tuple[Blob | None, bool]:
        """The object that a URI names, and whether the bucket is ours, so that we know if the object is missing."""
        for start in ("gs://", f"{self.url}/gcs/", f"{self.signed_url}/"):
            if uri.startswith(start):
                bucket, _, name = unquote(uri.removeprefix(start).partition("?")[0]).partition("/")
                return self.blobs.get((bucket, name)), True
        return None, False

    def sign(self, bucket: str, name: str, seconds: float | None = None) -> str:
        """A URL on the second port that gives access to one object for a while, without credentials."""
        until = int(self.now() + (self.settings.signed_seconds if seconds is None else seconds))
        where = quote(f"/{bucket}/{name}")
        return f"{self.signed_url}{where}?se={until}&sig={self._signature(where, str(until))}"

    def opened(self, call: Call) -> tuple[str, str]:
        """The object of a signed URL."""
        where, until = call.path, call.query.get("se", "")
        if not hmac.compare_digest(call.query.get("sig", ""), self._signature(where, until)):
            raise Refused(403, "the signature does not match", "AuthenticationFailed")
        if int(until) <= self.now():
            raise Refused(403, "the signed URL has expired", "AuthenticationFailed")
        bucket, _, name = unquote(where)[1:].partition("/")
        return bucket, name

    def _signature(self, where: str, until: str) -> str:
        return hmac.new(self._boot.encode(), f"{where} {until}".encode(), hashlib.sha256).hexdigest()[:32]


Handler = Callable[[], Answer]


class Protocol(ABC):
    """One provider's API."""

    name: str
    """The name in adapters and rules of faults; also the first part of its paths."""
    base: ClassVar[str] = ""
    """The part of a client's base URL after the name."""
    routes: ClassVar[Sequence[tuple[str, str, str]]]
    """Method, path and name; the method `do_<name>` answers."""
    auth: ClassVar[tuple[int, str, str]] = (401, "The API key is not valid.", "invalid_api_key")
    quota: ClassVar[tuple[int, str, str]] = (429, "You exceeded your current quota.", "insufficient_quota")

    def __init__(self, world: World) -> None:
        self.world = world
        self._routes = [(method, re.compile(_pattern(path)), name) for method, path, name in self.routes]

    def find(self, call: Call, path: str) -> tuple[str, Handler] | None:
        """The route's name, and its handler."""
        for method, pattern, name in self._routes:
            if method == call.verb and (found := pattern.fullmatch(path)) is not None:
                values = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                return name, functools.partial(getattr(self, f"do_{name}"), call, **values)
        return None

    def has(self, path: str) -> bool:
        """Whether this path exists, whatever the method."""
        return any(pattern.fullmatch(path) for _, pattern, _ in self._routes)

    def key_of(self, call: Call) -> str | None:
        """The credential of the request."""
        return call.bearer()

    @abstractmethod
    def error(self, refused: Refused) -> Answer:
        """The error in the provider's own format."""


def _pattern(path: str) -> str:
    return _PLACE.sub(lambda found: f"(?P<{found[1]}>{'.+' if found[2] else '[^/:]+'})", path)
