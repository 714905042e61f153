"""What all demos share: a temporary folder, settings, and workers that end when the demo ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from batchwright.app import AsyncBatchwright
from batchwright.cli.stop import Stop
from batchwright.db.statements import statements
from batchwright.engine.jobs import Job
from batchwright.engine.owned import JOBS_VIEW
from batchwright.engine.views import JobFilter
from batchwright.errors import BatchwrightError
from batchwright.private import open_private, write_private
from batchwright.settings import CONFIG, PREFIX

SQL = statements(__package__, "demo.sql", parts=JOBS_VIEW)

WORKERS = 2
LEASE_SECONDS = 3
LOOK_SECONDS = 0.05
START_SECONDS = 60.0
_TRACES = "OTEL_"
_LINES_SHOWN = 5

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tethered:
    """A process of the demo, and the file that gets its output."""

    process: asyncio.subprocess.Process
    log: Path

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    def last_lines(self) -> str:
        said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "; ".join(said[-_LINES_SHOWN:])


def make_say(out: Console) -> Say:
    def say(text: str, style: str = "") -> None:
        out.print(Text(text, style), soft_wrap=True)

    return say


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """The demo's own folder. If we run as root, the system user that runs PostgreSQL must be able to enter it."""
    folder = Path(tempfile.mkdtemp(prefix="batchwright-demo-"))
    if os.geteuid() == 0:
        folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def own_environment(folder: Path, settings: str) -> dict[str, str]:
    """Ignore the user's settings: the demo must never touch a database or a collector that is not its own."""
    file = folder / "batchwright.toml"
    write_private(file, settings)
    others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, _TRACES))}
    return {**others, CONFIG: str(file)}


@contextlib.asynccontextmanager
async def run_workers(environment: dict[str, str], folder: Path, name: str, *arguments: str) -> AsyncIterator[Tethered]:
    """Start `batchwright worker` with these arguments. It ends when this process ends, for whatever reason."""
    ours, theirs = socket.socketpair()
    path = folder / f"{name}.log"
    with open_private(path, "wb") as log, ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "batchwright", "worker", "--tether", str(theirs.fileno()), *arguments),
            cwd=folder,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield Tethered(process=process, log=path)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """The demo's own dashboard."""

    url: str
    say: Say

    async def stay(self) -> None:
        """Wait until the user presses Ctrl-C."""
        stop = Stop()
        stop.listen()
        self.say(f"the dashboard is still running: {self.url}; press Ctrl-C to end", "bold")
        await stop.asked.wait()


@contextlib.asynccontextmanager
async def show_dashboard(batchwright: AsyncBatchwright, say: Say) -> AsyncIterator[Dashboard]:
    """Serve the dashboard on a free port of this machine for as long as the demo runs."""
    server = await batchwright.server()
    server.start()
    try:
        dashboard = Dashboard(url=f"{server.url}/ui", say=say)
        say(f"watch it in a browser: {dashboard.url}", "bold")
        yield dashboard
    finally:
        await server.close()


async def wait_until_ready(
    batchwright: AsyncBatchwright, processes: Sequence[Tethered], workers: int = WORKERS
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while len(await batchwright.views.workers()) < workers:
        lost = next((one for one in processes if one.has_ended), None)
        if lost is not None or time.monotonic() > deadline:
            raise BatchwrightError(f"the demo's workers did not start: {(lost or processes[0]).last_lines()}")
        await asyncio.sleep(LOOK_SECONDS)


async def fetch_jobs(batchwright: AsyncBatchwright, wanted: JobFilter) -> list[Job]:
    return (await batchwright.views.page(wanted, limit=1000)).jobs


async def read_clock(batchwright: AsyncBatchwright) -> datetime:
    now: datetime
    ((now,),) = await batchwright.pool.rows(SQL["clock"])
    return now
