"""The one door for capabilities: what a part of Batchwright brings.

    core ──▶ part ──▶ work()   what it does in a worker: services, demand, rounds
                  ├─▶ serve()  what its routes need in the HTTP server
                  ├─▶ check()  what `batchwright check` looks at
                  ├─▶ inbox()  what waits for a person
                  └─▶ close()

A part declares what is known without a process: its settings, metrics, operations, routers, pages and commands. Each
may be named by its place, `package.module:name`, and is then loaded only where it is needed: clients and workers import
no web framework, and `--help` imports next to nothing. A part has only the facets that it needs; the others are empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from batchwright.core import Core
    from batchwright.db.check import Finding
    from batchwright.engine.views import InboxGroup
    from batchwright.engine.worker.duty import Duty, Site
    from batchwright.storage import Store
    from batchwright.telemetry.metrics import Counts, LabelLimits

Place = Any
"""`package.module:name`, or the object itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, or a group of them, which is loaded when it is called."""

    place: Place
    """A function with typer's annotations, or a `typer.Typer` with commands of its own."""
    help: str
    """One line for the list of commands."""


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """Requests of which the body may be larger, or must be smaller, than the settings say."""

    method: str
    path: str
    """A regular expression for the whole path."""
    bytes_max: int
    too_large: str
    """The answer to a larger one."""
    param: str
    """The parameter that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a part brings into an HTTP server that is about to start."""

    services: object = None
    """What its routes work with; they get it by its class: `service(request, Kind)`."""
    body_limits: Sequence[BodyLimit] = ()
    streams: Sequence[str] = ()
    """Paths of routes that may stay open, so that their times say nothing."""
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What an HTTP server offers to the parts that it serves."""

    counts: Counts
    """Counted in the database, as what workers count."""
    store: Store
    """The object store, with the patience that users have."""


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
    """Its tables of the configuration, by name: a frozen dataclass each, or an annotated dictionary of such."""
    metrics: ClassVar[Place] = ()
    """What it counts in worker processes: a sequence of `Metric`."""
    operations: ClassVar[Sequence[Place]] = ()
    """Its operations: functions that are marked by `@operation`."""
    routers: ClassVar[Sequence[Place]] = ()
    """Its HTTP routes: routers of FastAPI."""
    pages: ClassVar[Sequence[Place]] = ()
    """Its pages for people: routers, which are left out of the OpenAPI document."""
    commands: ClassVar[Mapping[str, Command]] = {}
    """Its commands, by name."""

    def __init__(self, core: Core) -> None:
        self.core = core

    @property
    def settings(self) -> Any:
        """Its table of the configuration, or its first one."""
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
        """What is right and wrong with it here; the database is open, unless a finding before says otherwise."""
        return ()

    async def inbox(self, tenant: str | None) -> Sequence[InboxGroup]:
        """What waits for a person, beside jobs that have failed; of one tenant, or of all (None)."""
        return ()

    async def close(self) -> None:
        """Let go of what the object itself holds, when the client is closed."""
