"""Real workers in their own folder, independent of the user's own settings."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from batchwright.settings import CONFIG, PREFIX

T = TypeVar("T")
START_SECONDS = 150.0


@asynccontextmanager
async def in_thread(blocking: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Starts and stops outside the event loop, because that is measuring others."""
    found = await asyncio.to_thread(blocking.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(blocking.__exit__, *sys.exc_info())


def environment_of(folder: Path, database_url: str, gateway_url: str, settings: dict[str, Any]) -> dict[str, str]:
    """The settings of a stage as the environment of its workers, without the user's own settings."""
    (folder / "batchwright.toml").touch()
    values = {
        "database_url": database_url,
        "database_folder": folder,
        **({"global_inference_gateway_url": gateway_url} if gateway_url else {}),
        "log_level": "WARNING",
        "worker_stop_grace_seconds": 0.5,
        **settings,
    }
    own = {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}
    others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "OTEL_"))}
    return {**others, **own, CONFIG: str(folder / "batchwright.toml")}


@asynccontextmanager
async def running_worker(folder: Path, environment: dict[str, str]) -> AsyncIterator[psutil.Process]:
    """A `batchwright worker` that is ready; it ends with this block, or with this process."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, (folder / "worker.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "batchwright", "worker", "--tether", str(theirs.fileno())),
            cwd=folder,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        theirs.close()
        try:
            async with asyncio.timeout(START_SECONDS):
                if not await asyncio.get_running_loop().sock_recv(ours, 1):
                    raise RuntimeError(f"a worker did not start: {worker_log(folder)}")
            yield psutil.Process(process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def worker_log(folder: Path) -> str:
    return (folder / "worker.log").read_text(errors="replace")[-600:]
