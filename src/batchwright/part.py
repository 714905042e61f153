"""The interface for capabilities: what a part of Batchwright provides.

    core ──▶ part ──▶ work()   what it does in a worker: services, demand, rounds
                  ├─▶ serve()  what its routes need in the HTTP server
                  ├─▶ check()  what `batchwright check` examines
                  ├─▶ inbox()  what waits for a person
                  ├─▶ client() what it offers to Python code, and blocking_client() to code without an event loop
                  ├─▶ attention()  what a person should look at now
                  ├─▶ spent_today()
                  └─▶ close()

A part declares what is known without a process: its settings, metrics, operations, routers, pages and commands. Each
may be given by name, `package.module:name`, and is then loaded only where it is needed: clients and workers import no
web framework, and `--help` imports very little. A part defines only what it needs; everything else is empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    from batchwright.core import Core
    from batchwright.db.check import Finding
    from batchwright.engine.attention import Concern
    from batchwright.engine.views import InboxGroup
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.inference.spending import Spent
    from batchwright.storage import Store
    from batchwright.telemetry.metrics import Counts, LabelLimits

T = TypeVar("T")
Place = Any
"""`package.module:name`, or the object itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, or a group of commands, which is loaded when it is called."""

    place: Place
    """A function with typer's annotations, or a `typer.Typer` with commands of its own."""
    help: str
    """One line for the list of commands, at most 60 characters."""
    group: str = "Other"
    """Where the list of commands shows it: Start, Batches, Jobs, Operate, or a group of your own."""


class Call(Protocol):
    """Runs a coroutine on the event loop of a blocking client, and waits for its answer."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The size limit for the bodies of some requests, instead of the one in the settings."""

    method: str
    path: str
    """A regular expression for the whole path."""
    bytes_max: int
    too_large: str
    """The error message for a larger body."""
    param: str
    """The parameter that the error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a part adds to an HTTP server that is about to start."""

    services: object = None
    """The services of its routes, which get them by class: `service(request, Kind)`."""
    body_limits: Sequence[BodyLimit] = ()
    streams: Sequence[str] = ()
    """Paths of routes whose answers may stay open; their durations are not measured."""
    fallbacks: Sequence[Any] = ()
    """Routes that are tried after those of all parts."""
    end_streams: Callable[[], None] | None = None
    """Ends its open responses; called when the server begins to stop."""
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What an HTTP server offers to the parts that it serves."""

    counts: Counts
    """Counts that are kept in the database, like those of workers."""
    store: Store
    """The object store, with short timeouts for users' requests."""


class Part:
    """A capability. There is one object of each kind in a client, a worker process or an HTTP server.

    >>> class Letters(Part):
    ...     name = "letters"
    ...     tables = {"letters": LetterSettings}
    ...     operations = ("letters.jobs:send_letter",)
    ...     routers = ("letters.web:router",)
    """

    name: ClassVar[str]
    """Unique among the parts."""
    tables: ClassVar[Mapping[str, Place]] = {}
    """Its configuration tables, by name: for each a frozen dataclass, or an annotated dictionary of such."""
    metrics: ClassVar[Place] = ()
    """Its metrics in worker processes: a sequence of `Metric`."""
    operations: ClassVar[Sequence[Place]] = ()
    """Its operations: functions marked with `@operation`."""
    routers: ClassVar[Sequence[Place]] = ()
    """Its HTTP routes: FastAPI routers."""
    pages: ClassVar[Sequence[Place]] = ()
    """Its dashboard pages: `batchwright.web.pages.Pages`, or other routers. The OpenAPI document omits them."""
    commands: ClassVar[Mapping[str, Command]] = {}
    """Its commands, by name."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def settings(self) -> Any:
        """Its configuration table; the first, if it has several."""
        return getattr(self.core.settings, next(iter(self.tables)))

    @property
    def is_active(self) -> bool:
        """Whether its operations run in the workers of this configuration."""
        return True

    def label_limits(self) -> LabelLimits:
        """Which values the labels of its metrics may take."""
        return {}

    def work(self, site: Site) -> Duty | None:
        """What it does in a worker process."""
        return None

    def serve(self, server: Server) -> Served | None:
        """What its routes need in an HTTP server."""
        return None

    async def check(self) -> Sequence[Finding]:
        """Findings for `batchwright check`; the database is open, unless an earlier finding says otherwise."""
        return ()

    async def inbox(self, tenant: str | None) -> Sequence[InboxGroup]:
        """Items that wait for a person, besides failed jobs; of one tenant, or of all (None)."""
        return ()

    def client(self) -> object | None:
        """What it offers to Python code in an event loop: what users of `AsyncBatchwright` work with."""
        return None

    def blocking_client(self, call: Call) -> object | None:
        """The same for sync code: what users of `Batchwright` work with."""
        return None

    async def attention(self, tenant: str | None) -> Sequence[Concern]:
        """What a person should look at now; of one tenant, or of all (None). Each query must be bounded."""
        return ()

    async def spent_today(self, tenant: str | None) -> Sequence[Spent]:
        """Costs of models today (UTC) that the sums of `inference.spending` do not include."""
        return ()

    async def close(self) -> None:
        """Release the part's own resources; called when the client is closed."""
