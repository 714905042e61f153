"""`windlass up` and `windlass worker`: the database, workers, and their graceful end."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from windlass.app import VERSION, AsyncWindlass
from windlass.cli.flags import Config, DatabaseUrl, settings_from
from windlass.cli.show import compact, console
from windlass.cli.stop import Stop, Tether, leave
from windlass.cli.supervisor import Supervisor
from windlass.db.check import describe, require_sessions
from windlass.db.migrate import require_current
from windlass.engine.worker import Worker
from windlass.errors import ConfigurationError, WindlassError
from windlass.operations.registry import Registry
from windlass.settings import PREFIX, Settings
from windlass.telemetry.logs import configure_logs

log = logging.getLogger(__name__)

_GUARD_SECONDS = 2.0
_GC_THRESHOLDS = (50_000, 20, 100)

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCES",
        help="Modules, files or folders with operations, beside those of the settings.",
        show_default=False,
    ),
]
Processes = Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Jobs that one process runs at the same time.", show_default=False)
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", metavar="NAME", help="Serve only this queue; repeat it.", show_default=False),
]
QueueLimits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N", help="Jobs of one queue that one process runs at once; repeat it.", show_default=False
    ),
]
TetherDescriptor = Annotated[int | None, typer.Option(hidden=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, as the command line said it; a child gets the same words again."""

    sources: Sequence[str]
    processes: int
    concurrency: int | None
    queues: Sequence[str]
    queue_limits: Sequence[str]
    database_url: str | None
    config: Path | None
    tether: int | None = None

    def settings(self) -> Settings:
        return settings_from(
            self.database_url,
            self.config,
            concurrency=self.concurrency,
            queues=tuple(self.queues) or None,
            queue_limits=dict(map(_limit, self.queue_limits)) or None,
        )

    def child_arguments(self) -> list[str]:
        arguments: list[str] = []
        if self.concurrency is not None:
            arguments += ["--concurrency", str(self.concurrency)]
        for queue in self.queues:
            arguments += ["--queue", queue]
        for limit in self.queue_limits:
            arguments += ["--queue-limit", limit]
        if self.config is not None:
            arguments += ["--config", str(self.config)]
        return [*arguments, "--", *self.sources]

    def child_environment(self) -> dict[str, str]:
        """The URL travels here, since a command line is public and a URL may hold a password."""
        url = {} if self.database_url is None else {f"{PREFIX}DATABASE_URL": self.database_url}
        return {**os.environ, **url}


def up(
    sources: Sources = None,
    processes: Processes = 1,
    concurrency: Concurrency = None,
    queue: Queues = None,
    queue_limit: QueueLimits = None,
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Only keep the database up and migrated.")] = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Start everything: the embedded PostgreSQL unless a URL is set, the schema, and workers.

    Runs until SIGTERM or Ctrl-C, which lets running jobs end; a second one leaves at once.
    """
    plan = Plan(
        sources=sources or (),
        processes=processes,
        concurrency=concurrency,
        queues=queue or (),
        queue_limits=queue_limit or (),
        database_url=database_url,
        config=config,
    )
    settings = plan.settings()
    configure_logs(settings.log.level, settings.log.form)
    if no_worker or not settings.worker.run_background_poller:
        _run(_keep_database(settings))
    elif processes > 1:
        _run(_supervise(plan, settings, is_up=True))
    else:
        _run(_work(plan, settings, is_up=True))


def worker(
    sources: Sources = None,
    processes: Processes = 1,
    concurrency: Concurrency = None,
    queue: Queues = None,
    queue_limit: QueueLimits = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    tether: TetherDescriptor = None,
) -> None:
    """Run workers on a database that is up and migrated.

    Runs until SIGTERM or Ctrl-C, which lets running jobs end; a second one leaves at once.
    """
    plan = Plan(
        sources=sources or (),
        processes=processes,
        concurrency=concurrency,
        queues=queue or (),
        queue_limits=queue_limit or (),
        database_url=database_url,
        config=config,
        tether=tether,
    )
    settings = plan.settings()
    configure_logs(settings.log.level, settings.log.form)
    _run((_supervise if processes > 1 else _work)(plan, settings, is_up=False))


def load_operations(settings: Settings, sources: Sequence[str]) -> Registry:
    """What the settings, the command line and installed packages offer; the current folder can be imported from."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return Registry.load(list(dict.fromkeys([*settings.operations, *sources])))
    except WindlassError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ConfigurationError(f"the operations cannot be loaded: {type(error).__name__}: {error}") from error


def _run(main: Coroutine[Any, Any, int]) -> None:
    """On uvloop if it is there; threads of operations that would not end do not keep the process."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(main)
        if code < 0:
            leave(0)
    raise typer.Exit(code)


_THREADS_LEFT = -1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _work(plan: Plan, settings: Settings, *, is_up: bool) -> int:
    stop = Stop()
    stop.listen()
    tether = None if plan.tether is None else Tether(plan.tether, stop, settings.worker.stop_grace_seconds)
    operations = load_operations(settings, plan.sources)
    if not is_up and not operations.names():
        raise ConfigurationError("there are no operations to run; name their source: windlass worker hello.py")
    windlass = await _open(settings, operations, is_up=is_up)
    try:
        if stop.asked.is_set():
            return 0
        clean = await _work_until(stop, windlass, tether, is_up)
        return 0 if clean else _THREADS_LEFT
    finally:
        await windlass.close()


async def _work_until(stop: Stop, windlass: AsyncWindlass, tether: Tether | None, is_up: bool) -> bool:
    worker = windlass.worker()
    stop.on_ask = lambda _: _stop(worker, windlass.settings)
    running = asyncio.create_task(worker.run())
    started = asyncio.create_task(worker.started.wait())
    await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if worker.started.is_set():
        _spare_the_collector()
        if tether is not None:
            tether.ready()
        if is_up:
            _print_banner(_banner(windlass, worker.id))
    return await running


def _stop(worker: Worker, settings: Settings) -> None:
    grace = settings.worker.stop_grace_seconds
    log.info(
        "stopping: running jobs may end within %g s, then they are given back; a second signal leaves at once", grace
    )
    worker.stop()


def _spare_the_collector() -> None:
    """What is loaded by now stays; the collector need not look at it again, nor at every few hundred rows."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _supervise(plan: Plan, settings: Settings, *, is_up: bool) -> int:
    """The parent loads no operations: its children do, and what is wrong with them they say."""
    stop = Stop()
    stop.listen()
    grace = settings.worker.stop_grace_seconds
    if plan.tether is not None:
        Tether(plan.tether, stop, 2 * grace)
    windlass = await _open(settings, Registry(), is_up=is_up)
    try:
        if is_up:
            sources = [*settings.operations, *plan.sources]
            _print_banner(_banner(windlass, f"{plan.processes} processes", sources))
        supervisor = Supervisor(
            plan.child_arguments(), plan.processes, stop, environment=plan.child_environment(), grace_seconds=grace
        )
        return await supervisor.run()
    finally:
        await windlass.close()


async def _keep_database(settings: Settings) -> int:
    """Nothing but the database: it is looked after until somebody says stop."""
    stop = Stop()
    stop.listen()
    windlass = await _open(settings, Registry(), is_up=True)
    try:
        _print_banner(
            [("database", _database(windlass)), ("worker", "none: --no-worker or worker.run_background_poller")]
        )
        while not stop.asked.is_set():
            try:
                await asyncio.wait_for(stop.asked.wait(), _GUARD_SECONDS)
            except TimeoutError:
                await _guard(windlass)
    finally:
        await windlass.close()
    return 0


async def _guard(windlass: AsyncWindlass) -> None:
    if windlass.embedded is not None:
        try:
            await asyncio.to_thread(windlass.embedded.ensure_running)
        except WindlassError as error:
            log.warning("the embedded PostgreSQL did not come back yet: %s", error)


async def _open(settings: Settings, operations: Registry, *, is_up: bool) -> AsyncWindlass:
    """Refuse what cannot work before anything runs; `up` brings the schema along, a worker only looks at it."""
    if settings.database.url is not None:
        await require_sessions(settings.database, settings.database.url)
    windlass = await AsyncWindlass(settings=settings, operations=operations).open(migrated=False)
    try:
        if is_up or windlass.embedded is not None:
            for migration in await windlass.migrate():
                log.info("applied the migration %04d_%s", migration.number, migration.name)
        else:
            await require_current(windlass.pool, VERSION)
    except BaseException:
        await windlass.close()
        raise
    return windlass


def _limit(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name or not number.isdecimal():
        raise typer.BadParameter(f"--queue-limit {text!r} is not NAME=N, such as gpu=1.")
    return name, int(number)


def _banner(windlass: AsyncWindlass, who: str, sources: Sequence[str] | None = None) -> Iterator[tuple[str, str]]:
    settings = windlass.settings.worker
    names = windlass.operations.names()
    queues = ", ".join(settings.queues) if settings.queues else "all queues"
    yield "database", _database(windlass)
    if sources is None:
        yield "operations", ", ".join(names) or "none: name a module, a file or a folder, as in windlass up hello.py"
    else:
        yield "operations", f"from {', '.join(sources) or 'installed packages'}"
    yield "worker", f"{who} · {settings.concurrency} jobs at a time{'' if sources is None else ' each'} · {queues}"
    yield "submit", _example(windlass.operations)
    yield "stop", "Ctrl-C lets running jobs end, a second one leaves at once"


def _database(windlass: AsyncWindlass) -> str:
    if windlass.embedded is not None:
        return f"embedded PostgreSQL {windlass.embedded.major} in {windlass.embedded.root}"
    return describe(windlass.pool.url)


def _example(operations: Registry) -> str:
    """A command that can be pasted, with a payload of the right shape."""
    first = operations.get(operations.names()[0]) if operations.names() else None
    if first is None:
        return "windlass job submit TYPE --payload '{…}' --watch"
    properties: dict[str, Any] = first.payload_schema.get("properties", {})
    payload = {
        name: _sample(properties[name]) for name in first.payload_schema.get("required", ()) if name in properties
    }
    words = f" --payload '{compact(payload)}'" if payload else ""
    return f"windlass job submit {first.name}{words} --watch"


def _sample(schema: dict[str, Any]) -> Any:
    samples = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return schema.get("enum", [samples.get(schema.get("type", ""))])[0]


def _print_banner(lines: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(f"  {name}", "cyan"), Text(text))
    out = console()
    out.print(Text(f"Windlass {VERSION}", "bold"))
    out.print(grid)
