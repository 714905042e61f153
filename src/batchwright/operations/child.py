"""The program of a worker's child processes.

    perform      runs `cpu=True` operations that the parent hands over, one after the other
    isolate JOB  claims one suspect job, runs it as a separate worker, then ends

Everything it needs is in the environment variable BATCHWRIGHT_CHILD, a JSON object written by the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO
from uuid import UUID

import orjson

from batchwright.db.database import Database, DatabaseSettings, Pool
from batchwright.engine.context import Child, Context, Joined
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.queue import EngineSettings, Queue
from batchwright.engine.worker.duty import WorkerPart
from batchwright.engine.worker.processes import CHILD_BRIEF, ChildProgram, end_with_parent
from batchwright.engine.worker.worker import Program, Worker, WorkerSettings
from batchwright.errors import Fatal
from batchwright.operations.registry import Registry
from batchwright.plugins import load
from batchwright.telemetry.logs import configure_logs, configured_logs, job_in_hand

_COMMAND = (sys.executable, "-m", "batchwright.operations.child")
_LENGTH = struct.Struct(">I")
_ORPHAN_GRACE_SECONDS = 1.0
_ORPHAN_SECONDS_MAX = 15.0


def child_program(
    pool: Pool, registry: Registry, engine: EngineSettings, *, parts: Mapping[str, Any], version: str
) -> ChildProgram:
    """The command for this program, with its brief; `parts` are the settings of a worker's parts, and their factory."""
    brief = {
        "url": pool.url,
        "database": dataclasses.asdict(pool.settings),
        "engine": dataclasses.asdict(engine),
        "sources": sorted({*registry.sources.values()}),
        "entry_points": False,
        "logs": configured_logs(),
        "path": sys.path,
        "version": version,
        "parts": parts,
    }
    return ChildProgram(_COMMAND, {CHILD_BRIEF: orjson.dumps(brief).decode()})


def main() -> int:
    brief = orjson.loads(os.environ[CHILD_BRIEF])
    output = _take_stdout()
    sys.path[:0] = [entry for entry in brief["path"] if entry not in sys.path]
    if (logs := brief.get("logs")) is not None:
        configure_logs(**logs)
    registry = Registry.load(brief["sources"], entry_points=brief["entry_points"])
    if sys.argv[1] == "isolate":
        return asyncio.run(_isolate(JobId(UUID(sys.argv[2])), brief, registry, output))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    _Performer(registry, output).run()
    return 0


def _take_stdout() -> BinaryIO:
    """Keep the pipe for frames; an operation's output goes to standard error."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipe


def _send(output: BinaryIO, value: Any) -> None:
    document = pickle.dumps(value)
    output.write(_LENGTH.pack(len(document)) + document)


class _Performer:
    """Runs the operations that the parent sends; ends at once when the parent is gone."""

    def __init__(self, registry: Registry, output: BinaryIO) -> None:
        self._registry = registry
        self._output = output
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            _, name, claim, counts = self._inbox.get()
            self._say(self._perform(name, claim, counts))

    def _perform(self, name: str, claim: Claim, counts: tuple[int, int, int, int, int] | None) -> Any:
        job_in_hand.set(claim)
        try:
            operation = self._registry.get(name)
            if operation is None:
                raise Fatal(f"the child process does not know the operation {name!r}")
            joined = None if counts is None else Joined(*counts, fetch=self._children)
            arguments = operation.arguments(claim.payload)
            if operation.takes_context:
                arguments["ctx"] = Context(claim, self, joined=joined)
            return _picklable(("returned", operation.function(**arguments)))
        except BaseException as error:
            error.add_note(f"in the child process {os.getpid()}")
            return _picklable(("raised", error))

    def emit(self, claim: Claim, event: Mapping[str, Any]) -> None:
        frame = _picklable(("emit", dict(event)))
        if frame[0] == "raised":
            raise frame[1]
        self._say(frame)

    def progress(self, claim: Claim, current: int | None, total: int | None) -> None:
        self._say(("progress", current, total))

    def _children(self, after: UUID) -> list[Child]:
        self._say(("children", after))
        children: list[Child] = self._inbox.get()
        return children

    def _say(self, value: Any) -> None:
        with self._lock:
            _send(self._output, value)

    def _listen(self) -> None:
        stdin = sys.stdin.buffer
        while header := stdin.read(_LENGTH.size):
            (length,) = _LENGTH.unpack(header)
            self._inbox.put(pickle.loads(stdin.read(length)))  # noqa: S301 (our own parent)
        os._exit(1)


def _picklable(frame: tuple[str, Any]) -> tuple[str, Any]:
    try:
        pickle.loads(pickle.dumps(frame))  # noqa: S301 (what we have just written)
    except Exception as error:
        text = f"{type(frame[1]).__name__} cannot be sent to the worker's process: {error}"
        return ("raised", Fatal(text, code="result_not_storable" if frame[0] == "returned" else "unexpected"))
    return frame


async def _isolate(id: JobId, brief: dict[str, Any], registry: Registry, output: BinaryIO) -> int:
    settings = DatabaseSettings(**brief["database"])
    async with Pool(settings, brief["url"]) as pool:
        child = ChildProgram(_COMMAND, {})
        worker = Worker(
            pool,
            registry,
            parts=_parts(brief, pool, registry),
            program=Program(child=child, version=brief["version"]),
            queue=Queue(Database(pool), EngineSettings(**brief["engine"])),
            settings=WorkerSettings(concurrency=1),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        _ParentWatch(worker)
        await worker.run_alone(id, lambda claim: _tell(output, claim.claim))
    if worker.has_abandoned_threads:  # the interpreter would wait for them
        os._exit(0)
    return 0


class _ParentWatch:
    """Waits for the parent's death, then releases the job and makes sure that the process ends.

    Otherwise the process would hold its job, with open requests and without supervision, until the job ends.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        end_with_parent(signal.SIGTERM)
        threading.Thread(target=self._listen, name="batchwright-parent", daemon=True).start()

    def _listen(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process has ended anyway
            self._loop.call_soon_threadsafe(self._worker.hurry, _ORPHAN_GRACE_SECONDS)
        time.sleep(_ORPHAN_SECONDS_MAX)
        os._exit(1)


def _parts(brief: dict[str, Any], pool: Pool, registry: Registry) -> Sequence[WorkerPart]:
    """The parts of the parent's worker, created again by the function that the brief names."""
    if (wanted := brief.get("parts")) is None:
        return ()
    made: Sequence[WorkerPart] = load(wanted["factory"])(wanted["settings"], pool, registry)
    return made


def _tell(output: BinaryIO, claim: int) -> None:
    """Report the claim. A parent that was killed meanwhile does not receive it; the job is released then."""
    with contextlib.suppress(BrokenPipeError):
        _send(output, claim)


if __name__ == "__main__":
    sys.exit(main())
