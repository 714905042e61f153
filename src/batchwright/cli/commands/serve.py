"""`batchwright up`, `worker` and `api`: start the database, workers and the HTTP server, and stop them gracefully."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import sys
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchwright.app import VERSION, AsyncBatchwright
from batchwright.cli.commands.banner import banner_lines, print_banner
from batchwright.cli.descriptors import raise_descriptor_limit
from batchwright.cli.flags import Config, DatabaseUrl, TetherDescriptor, settings_from
from batchwright.cli.listeners import Listener, find_listener
from batchwright.cli.loop import loop_factory, spare_the_collector
from batchwright.cli.stop import Stop, Tether, leave
from batchwright.cli.supervisor import Supervisor
from batchwright.db.migrate import require_current
from batchwright.engine.worker.worker import Worker
from batchwright.errors import BatchwrightError, ConfigurationError, WorkerBroken
from batchwright.operations.registry import Registry
from batchwright.settings import PREFIX, Settings, use_model_server
from batchwright.telemetry import tracing
from batchwright.telemetry.logs import configure_logs
from batchwright.terminal import columns_of, wrap

if TYPE_CHECKING:
    from batchwright.api.server import ApiServer

log = logging.getLogger(__name__)

_GUARD_SECONDS = 2.0
_OURS = str(Path(__file__).parents[2])

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCES",
        help="Modules, files or folders with operations, in addition to those in the settings.",
        show_default=False,
    ),
]
Processes = Annotated[int, typer.Option(min=1, max=256, help="Number of worker processes.")]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of jobs that one process runs at the same time.", show_default=False),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", metavar="NAME", help="Serve only this queue; may be repeated.", show_default=False),
]
QueueLimits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N", help="Maximum number of jobs of one queue per process; may be repeated.", show_default=False
    ),
]
Host = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Address of the HTTP server; any but a loopback address needs an API key."),
]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")]
SocketFile = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        metavar="FILE",
        help="Unix socket to listen on instead of a port; only your user can connect.",
        show_default=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Model server for batches, such as http://127.0.0.1:8000; by default that of the settings.",
        show_default=False,
    ),
]
OrNone = Annotated[bool, typer.Option("--or-none", hidden=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command line, which is also passed to child processes."""

    sources: Sequence[str]
    processes: int
    concurrency: int | None
    queues: Sequence[str]
    queue_limits: Sequence[str]
    database_url: str | None
    config: Path | None
    url: str | None = None
    host: str | None = None
    port: int | None = None
    socket: Path | None = None
    tether: int | None = None
    or_none: bool = False
    """Whether a worker without any operation may run, as under `up`."""

    def settings(self) -> Settings:
        settings = settings_from(
            self.database_url,
            self.config,
            worker={
                "concurrency": self.concurrency,
                "queues": tuple(self.queues) or None,
                "queue_limits": dict(map(_parse_limit, self.queue_limits)) or None,
            },
            api={"host": self.host, "port": self.port, "socket": self.socket},
        )
        if settings.api.socket is not None and (self.host is not None or self.port is not None):
            raise ConfigurationError(
                f"the server listens on the unix socket {settings.api.socket} (api.socket) instead of a port; "
                "leave --host and --port out, or remove that setting"
            )
        return settings if self.url is None else use_model_server(settings, self.url)

    def child_arguments(self) -> list[str]:
        arguments: list[str] = []
        if self.concurrency is not None:
            arguments += ["--concurrency", str(self.concurrency)]
        for queue in self.queues:
            arguments += ["--queue", queue]
        for limit in self.queue_limits:
            arguments += ["--queue-limit", limit]
        if self.url is not None:
            arguments += ["--url", self.url]
        if self.config is not None:
            arguments += ["--config", str(self.config)]
        if self.or_none:
            arguments += ["--or-none"]
        return [*arguments, "--", *self.sources]

    def child_environment(self, settings: Settings, number: int) -> dict[str, str]:
        """Passes the URL of the database, which may contain a password: other users can see command lines. Also gives
        each child its own health port."""
        more = {} if self.database_url is None else {f"{PREFIX}DATABASE_URL": self.database_url}
        if port := settings.worker.health_port:
            more[f"{PREFIX}WORKER_HEALTH_PORT"] = str(port + number)
        return {**os.environ, **more}


def up(
    sources: Sources = None,
    processes: Processes = 1,
    concurrency: Concurrency = None,
    queue: Queues = None,
    queue_limit: QueueLimits = None,
    url: Url = None,
    host: Host = None,
    port: Port = None,
    socket: SocketFile = None,
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Run no workers here.")] = False,
    no_api: Annotated[bool, typer.Option("--no-api", help="Run no HTTP server here.")] = False,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Start everything: the embedded PostgreSQL unless a URL is set, the schema, the HTTP server, and workers.

    Workers run in separate processes: one that dies is replaced, and the server keeps running. Runs until SIGTERM or
    Ctrl-C, which lets running jobs end; press Ctrl-C again to quit now.
    """
    launch = Launch(
        sources=sources or (),
        processes=processes,
        concurrency=concurrency,
        queues=queue or (),
        queue_limits=queue_limit or (),
        database_url=database_url,
        config=config,
        url=url,
        host=host,
        port=port,
        socket=socket,
        or_none=True,
    )
    settings = launch.settings()
    configure_logs(settings.log.level, settings.log.form)
    has_worker = settings.worker.run_background_poller and not no_worker
    _run(_serve(launch, settings, is_up=True, has_worker=has_worker, has_api=not no_api), settings)


def worker(
    sources: Sources = None,
    processes: Processes = 1,
    concurrency: Concurrency = None,
    queue: Queues = None,
    queue_limit: QueueLimits = None,
    url: Url = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    tether: TetherDescriptor = None,
    or_none: OrNone = False,
) -> None:
    """Run workers on a database that is up and migrated.

    Runs until SIGTERM or Ctrl-C, which lets running jobs end; press Ctrl-C again to quit now.
    """
    launch = Launch(
        sources=sources or (),
        processes=processes,
        concurrency=concurrency,
        queues=queue or (),
        queue_limits=queue_limit or (),
        database_url=database_url,
        config=config,
        url=url,
        tether=tether,
        or_none=or_none,
    )
    settings = launch.settings()
    configure_logs(settings.log.level, settings.log.form)
    if processes > 1:
        _run(_serve(launch, settings, is_up=False, has_worker=True, has_api=False), settings)
    else:
        _run(_work(launch, settings), settings)


def api(
    host: Host = None,
    port: Port = None,
    socket: SocketFile = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
) -> None:
    """Run the HTTP server on a database that is up and migrated.

    Without an API key it listens only on a loopback address or a unix socket; `batchwright key create` creates a key.
    Runs until SIGTERM or Ctrl-C.
    """
    launch = Launch(
        sources=(),
        processes=1,
        concurrency=None,
        queues=(),
        queue_limits=(),
        database_url=database_url,
        config=config,
        host=host,
        port=port,
        socket=socket,
    )
    settings = launch.settings()
    configure_logs(settings.log.level, settings.log.form)
    _run(_serve(launch, settings, is_up=False, has_worker=False, has_api=True), settings)


def load_operations(settings: Settings, sources: Sequence[str]) -> Registry:
    """The operations of the settings, the command line and installed packages. The current folder is importable."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return Registry.load(list(dict.fromkeys([*settings.operations, *sources])))
    except BatchwrightError:
        raise
    except Exception as error:
        _print_traceback(error)
        raise ConfigurationError(f"the operations cannot be loaded: {type(error).__name__}: {error}") from error


def _print_traceback(error: Exception) -> None:
    """From the first line of the user's code: what leads there is ours, and Python's way to import it."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen importlib")):
        step = step.tb_next
    traceback.print_exception(type(error), error, step)


def _run(main: Coroutine[Any, Any, int], settings: Settings) -> None:
    """Run on uvloop if it is installed. Threads of operations that do not end do not keep the process alive.

    Threads of a remote store may abort an interpreter that exits in the usual way.
    """
    raise_descriptor_limit()
    tracing.start(version=VERSION)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(main)
        tracing.stop()
        if code < 0 or settings.storage.url is not None:
            leave(_EXIT_CODES.get(code, code))
    raise typer.Exit(code)


_THREADS_LEFT = -1
_BROKEN = -2
_EXIT_CODES = {_THREADS_LEFT: 0, _BROKEN: 1}


async def _work(launch: Launch, settings: Settings) -> int:
    """One worker, in this process."""
    stop = Stop()
    stop.listen()
    tether = None if launch.tether is None else Tether(launch.tether, stop, settings.worker.stop_grace_seconds)
    operations = load_operations(settings, launch.sources)
    has_more = settings.has_gateways or bool(settings.table("providers", dict))
    if not operations.names() and not launch.or_none and not has_more:
        log.warning(
            "this worker runs documents only: name the source of your operations (batchwright worker hello.py), a "
            "model server for batches (--url, or global_inference_gateway.url), or providers for tasks "
            "([providers.openai])"
        )
    batchwright = await _open(settings, operations, is_up=False)
    try:
        if stop.asked.is_set():
            return 0
        is_clean = await _work_until(stop, batchwright, tether)
    except WorkerBroken as error:
        typer.echo(wrap(f"error: {error}", columns_of(sys.stderr)), err=True)
        return _BROKEN
    else:
        return 0 if is_clean else _THREADS_LEFT
    finally:
        await batchwright.close()


async def _work_until(stop: Stop, batchwright: AsyncBatchwright, tether: Tether | None) -> bool:
    worker = batchwright.worker()
    health = batchwright.health(worker)
    if health is not None:
        await health.start()
    stop.on_ask = lambda _: _stop(worker, batchwright.settings)
    running = asyncio.create_task(worker.run())
    started = asyncio.create_task(worker.started.wait())
    await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if worker.started.is_set():
        spare_the_collector()
        if tether is not None:
            tether.ready()
    try:
        return await running
    finally:
        if health is not None:
            await health.close()


def _stop(worker: Worker, settings: Settings) -> None:
    grace = settings.worker.stop_grace_seconds
    log.info("stopping: running jobs have %g s to end, then they return to the queue; a second signal quits now", grace)
    worker.stop()


async def _serve(launch: Launch, settings: Settings, *, is_up: bool, has_worker: bool, has_api: bool) -> int:
    """Run the HTTP server in this process, and workers in child processes.

    This process loads no operations: its children do, and report problems with them.
    """
    stop = Stop()
    stop.listen()
    if launch.tether is not None:
        Tether(launch.tether, stop, 2 * settings.worker.stop_grace_seconds)
    batchwright = await _open(settings, Registry(), is_up=is_up)
    try:
        if has_worker:
            await batchwright.pool.explore_leases()
        server = await _open_server(batchwright) if has_api else None
        watch = [asyncio.create_task(_guard_until(stop, batchwright))]
        if server is not None:
            server.start().add_done_callback(lambda _: stop.ask())
        supervisor = _make_supervisor(launch, settings, stop) if has_worker else None
        if is_up or has_api:
            watch.append(asyncio.create_task(_announce(launch, batchwright, server, supervisor)))
        try:
            return await supervisor.run() if supervisor is not None else await _wait_until_asked(stop)
        finally:
            stop.ask()
            if server is not None:
                await server.close()
            for task in watch:
                task.cancel()
            await asyncio.gather(*watch, return_exceptions=True)
    finally:
        await batchwright.close()


async def _open_server(batchwright: AsyncBatchwright) -> ApiServer:
    try:
        return await batchwright.server()
    except ConfigurationError as error:
        api = batchwright.settings.api
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE and (found := find_listener(api.port)):
            raise ConfigurationError(_describe_listener(found, api.host, api.port)) from error
        raise


def _describe_listener(found: Listener, host: str, port: int) -> str:
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if found.is_batchwright:
        return (
            f"Batchwright is already running at {where}, pid {found.pid}; use that one, or start another with --port 0"
        )
    return f"port {port} is in use by {found.name}, pid {found.pid}; choose another one with --port"


def _make_supervisor(launch: Launch, settings: Settings, stop: Stop) -> Supervisor:
    return Supervisor(
        launch.child_arguments(),
        launch.processes,
        stop,
        environment=functools.partial(launch.child_environment, settings),
        grace_seconds=settings.worker.stop_grace_seconds,
    )


async def _wait_until_asked(stop: Stop) -> int:
    await stop.asked.wait()
    return 0


async def _announce(
    launch: Launch, batchwright: AsyncBatchwright, server: ApiServer | None, supervisor: Supervisor | None
) -> None:
    """Print the banner as soon as everything runs."""
    if supervisor is not None:
        await supervisor.ready.wait()
    operations = [one for one in await batchwright.views.operations() if one.workers]
    lines = banner_lines(
        batchwright,
        operations,
        url=None if server is None else server.url,
        has_key=await batchwright.keys.any(),
        processes=launch.processes if supervisor is not None else 0,
    )
    print_banner(lines)


async def _guard_until(stop: Stop, batchwright: AsyncBatchwright) -> None:
    """Restart the embedded database if it dies, until it is time to stop."""
    while not stop.asked.is_set():
        try:
            await asyncio.wait_for(stop.asked.wait(), _GUARD_SECONDS)
        except TimeoutError:
            await _guard(batchwright)


async def _guard(batchwright: AsyncBatchwright) -> None:
    if batchwright.embedded is not None:
        try:
            await asyncio.to_thread(batchwright.embedded.ensure_running)
        except BatchwrightError as error:
            log.warning("the embedded PostgreSQL has not restarted yet: %s", error)


async def _open(settings: Settings, operations: Registry, *, is_up: bool) -> AsyncBatchwright:
    """Open the database before anything runs. `up` migrates the schema; a worker only checks it."""
    batchwright = await AsyncBatchwright(settings=settings, operations=operations).open(migrated=False)
    try:
        if is_up or batchwright.embedded is not None:
            for migration in await batchwright.migrate():
                log.info("applied the migration %04d_%s", migration.number, migration.name)
        else:
            await require_current(batchwright.pool, VERSION)
    except BaseException:
        await batchwright.close()
        raise
    return batchwright


def _parse_limit(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name or not number.isdecimal():
        raise typer.BadParameter(f"--queue-limit {text!r} is invalid: write NAME=N, such as gpu=1.")
    return name, int(number)
