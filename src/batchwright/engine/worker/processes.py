"""Processes for CPU-bound operations, and for jobs that must run alone.

A child is an ordinary Python process that exchanges length-prefixed pickles over its standard input and output. It can
be killed at any moment: the only sure way to cancel a plain function. It ends with its parent, however that dies: the
kernel sends it a signal, where supported, and closes the parent's end of the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from batchwright.engine.context import Context
from batchwright.engine.jobs import Claim, JobId
from batchwright.engine.operation import Operation
from batchwright.errors import ConfigurationError

log = logging.getLogger(__name__)

CHILD_BRIEF = "BATCHWRIGHT_CHILD"
_LENGTH = struct.Struct(">I")
_FRAME_BYTES_MAX = 64 * 1024 * 1024
_IDLE_CHILDREN_MAX = 4
_RELEASE_SECONDS = 10.0  # time for the process of an isolated job to release it, when the worker stops
_PR_SET_PDEATHSIG = 1


class Died(Exception):
    """The child process ended without an answer."""


def end_with_parent(number: signal.Signals) -> None:
    """In a child: have the kernel send this signal when the parent dies.

    If the parent died before this call, the end of its pipe shows it; every child listens for that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))


async def see_the_end(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process to end. Even a cancelled caller waits, so that no process is left behind."""
    is_cancelled = False
    while process.returncode is None:
        try:
            await process.wait()
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


class Killable(Protocol):
    kill: Callable[[], object] | None


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """How to start a child process: its command line, and additional environment variables."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


class Processes:
    """A pool of children, each with one job at a time; the next job replaces a child that died."""

    def __init__(self, program: ChildProgram | None, limit: int) -> None:
        self._program = program
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._performing = 0
        self._busy: set[_Child] = set()
        self._idle: list[_Child] = []
        self._alone: set[_Child] = set()

    @property
    def free(self) -> int:
        return self._limit - self._performing

    @property
    def can_isolate(self) -> bool:
        return self._program is not None

    async def perform(self, operation: Operation, claim: Claim, context: Context, running: Killable) -> Any:
        """Run the operation in a child as soon as one is free; raises what it raised, or Died."""
        self._performing += 1
        waiting = asyncio.current_task()
        running.kill = None if waiting is None else waiting.cancel
        try:
            async with self._slots:
                running.kill = None
                return await self._perform(operation, claim, context, running)
        finally:
            self._performing -= 1

    async def _perform(self, operation: Operation, claim: Claim, context: Context, running: Killable) -> Any:
        child = self._take_idle() or await self._spawn("perform")
        self._busy.add(child)
        running.kill = child.kill
        try:
            if context.cancelled:
                raise Died("interrupted before it began")
            return await child.perform(operation.name, claim, context)
        finally:
            running.kill = None
            self._busy.discard(child)
            if child.is_fit and len(self._idle) < _IDLE_CHILDREN_MAX:
                self._idle.append(child)
            else:
                child.kill()
                await see_the_end(child.process)

    def _take_idle(self) -> _Child | None:
        """A live child: even an idle one may have been killed, for example for lack of memory."""
        while self._idle:
            child = self._idle.pop()
            if child.is_fit and child.process.returncode is None:
                return child
        return None

    async def isolate(self, id: JobId) -> int | None:
        """Let a separate process claim and run this job; returns its claim if the process died.

        If this worker is killed, the process releases the job and ends: the job is not at fault.
        """
        child = await self._spawn("isolate", str(id))
        self._alone.add(child)
        claim: int | None = None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError):
                claim = await child.receive()
            code = await child.process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
            raise
        self._alone.discard(child)
        return claim if code != 0 else None

    async def close(self) -> None:
        for child in [*self._idle, *self._busy]:
            child.kill()
            await see_the_end(child.process)
        self._idle.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                for child in self._alone:
                    child.hang_up()
                    await child.process.wait()

    async def _spawn(self, *arguments: str) -> _Child:
        if self._program is None:
            raise ConfigurationError("this worker cannot start processes for cpu=True operations")
        process = await asyncio.create_subprocess_exec(
            *self._program.command,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._program.environment},
            start_new_session=True,
        )
        return _Child(process)


class _Child:
    """One process and the communication with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.is_fit = True
        self._is_killed = False

    async def perform(self, name: str, claim: Claim, context: Context) -> Any:
        joined = context.joined
        counts = (
            None if joined is None else (joined.round, joined.total, joined.succeeded, joined.failed, joined.cancelled)
        )
        self.is_fit = False
        try:
            await self.send(("perform", name, claim, counts))
            answer = await self._converse(claim, context)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await self.process.wait()
            raise Died(f"exit code {code}") from error
        self.is_fit = not self._is_killed  # the answer may have been in transit when the job was interrupted
        match answer:
            case ("raised", error):
                raise error  # outside of the try above: an operation's own ConnectionError is not a death
            case (_, outcome):
                return outcome

    async def _converse(self, claim: Claim, context: Context) -> tuple[str, Any]:
        """Pass on the child's messages until it reports how the operation ended."""
        joined = context.joined
        while True:
            match await self.receive():
                case ("emit", event):
                    context._reporter.emit(claim, event)  # noqa: SLF001 (the child's context speaks through ours)
                case ("progress", current, total):
                    context.progress(current, total)
                case ("children", UUID() as after) if joined is not None:
                    await self.send(await joined.fetch(after))
                case ("returned" | "raised" as how, what):
                    return how, what
                case frame:
                    raise Died(f"it sent an unknown message: {frame!r}")

    async def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        document = pickle.dumps(value)
        try:
            self.process.stdin.write(_LENGTH.pack(len(document)) + document)
        except RuntimeError as error:  # what uvloop raises for a closed pipe
            raise ConnectionResetError(str(error)) from error
        await self.process.stdin.drain()

    async def receive(self) -> Any:
        assert self.process.stdout is not None
        (length,) = _LENGTH.unpack(await self.process.stdout.readexactly(_LENGTH.size))
        if length > _FRAME_BYTES_MAX:
            self.kill()
            raise Died(f"it sent a message of {length} bytes; the limit is {_FRAME_BYTES_MAX}")
        return pickle.loads(await self.process.stdout.readexactly(length))  # noqa: S301 (our own child)

    def hang_up(self) -> None:
        """Has the same effect as the death of this process: the child releases its job and ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.is_fit = False
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
