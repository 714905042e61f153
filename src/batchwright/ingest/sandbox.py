"""Extraction in separate processes, so that no document can crash the worker.

Every failure has a class, which decides what happens next, and a code for its cause:

    Fatal, scope item    damaged_document, encrypted_document, cpu_limit, out_of_memory, document_too_large,
                         text_too_large, too_many_pages, unpacked_too_large, nested_too_deep, extractor_crash,
                         extractor_error
    SchemaInvalid        empty_document, no_text_layer, unsupported_format, wrong_format
    Transient            document_unreadable, extraction_timeout, extractor_killed, sandbox_lost
    ConfigurationError   a library is not installed
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from batchwright.engine.worker.processes import see_the_end
from batchwright.errors import ConfigurationError, Fatal, OperationError, SchemaInvalid, Transient
from batchwright.ingest.extract.dispatch import EXTRACTORS
from batchwright.ingest.limits import Limits
from batchwright.ingest.messages import LENGTH, Answer, Ending, Failure, Request
from batchwright.ingest.text import CanonicalText, text_too_large

_ABORTS = frozenset(
    (signal.SIGABRT, signal.SIGILL, signal.SIGTRAP)
)  # the signals that end C++ code when it is out of memory
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
_GRACE_SECONDS = 5.0
_SERVER = "batchwright.ingest.child"


class Sandbox:
    """Extracts one document at a time; create one for each core to use.

    >>> async with Sandbox(Limits(pages=500)) as sandbox:
    ...     text = await sandbox.extract(Path("report.pdf"))
    """

    def __init__(self, limits: Limits | None = None, *, extractors: Mapping[str, str] = EXTRACTORS) -> None:
        if sys.platform == "win32":
            raise ConfigurationError("documents are extracted on Linux and macOS only: Windows has no process limits")
        self._limits = limits or Limits()
        self._extractors = dict(extractors)
        self._server: Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def extract(self, path: Path, *, name: str | None = None, limits: Limits | None = None) -> CanonicalText:
        """The text of the document in this file; `name` is its name in the source."""
        limits = limits or self._limits
        request = self._request(path, name or path.name, limits)
        async with self._turn:
            ending, answer = await self._ask(request, limits)
        return _read(ending, answer, limits)

    async def close(self) -> None:
        """End the processes. The sandbox starts them again at the next use."""
        server, self._server = self._server, None
        if server is not None:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            try:
                await see_the_end(server)
            finally:
                await server.communicate()

    def _request(self, path: Path, name: str, limits: Limits) -> Request:
        name = name.encode("utf-8", "replace").decode()
        return Request(path=str(path.absolute()), name=name, limits=limits, extractors=self._extractors)

    async def _ask(self, request: Request, limits: Limits) -> tuple[Ending, bytes]:
        """The fork ends itself at its time limit. If that fails, end all processes of the sandbox from here."""
        try:
            async with asyncio.timeout(limits.seconds + _GRACE_SECONDS):
                return await self._exchange(request)
        except TimeoutError:
            await self.close()
            raise _timed_out(limits) from None
        except (EOFError, OSError) as error:
            await self.close()
            raise Transient("the extraction process ended unexpectedly", code="sandbox_lost") from error
        except BaseException:
            await self.close()
            raise

    async def _exchange(self, request: Request) -> tuple[Ending, bytes]:
        server = self._server = self._server or await self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        packed = msgspec.msgpack.encode(request)
        server.stdin.write(LENGTH.pack(len(packed)) + packed)
        await server.stdin.drain()
        (length,) = LENGTH.unpack(await server.stdout.readexactly(LENGTH.size))
        ending = msgspec.msgpack.decode(await server.stdout.readexactly(length), type=Ending)
        return ending, await server.stdout.readexactly(ending.answer_bytes)

    async def _start(self) -> Process:
        """The environment holds no secrets, so a compromised parser finds none."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        command = (sys.executable, "-m", _SERVER, *sorted(set(self._extractors.values())))
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
        )


def _read(ending: Ending, answer: bytes, limits: Limits) -> CanonicalText:
    if ending.is_answer_too_large:
        raise text_too_large(limits.output_bytes)
    if ending.exit_code != 0:
        raise _why_ended(ending, limits)
    try:
        decoded = msgspec.msgpack.decode(answer, type=Answer)
    except msgspec.MsgspecError as error:
        raise Fatal(f"the extractor's answer is invalid: {error}", scope="item", code="extractor_error") from error
    if decoded.failure is not None:
        _raise(decoded.failure, limits)
    if decoded.text is None:
        raise Fatal("the extractor's answer is empty", scope="item", code="extractor_error")
    return decoded.text


def _raise(failure: Failure, limits: Limits) -> NoReturn:
    match failure.kind:
        case "configuration":
            raise ConfigurationError(failure.message)
        case "memory":
            raise _out_of_memory(limits)
        case "schema_invalid":
            raise SchemaInvalid(failure.message, code=failure.code)
        case "transient":
            raise Transient(failure.message, code=failure.code)
        case _:
            raise Fatal(failure.message, scope="item", code=failure.code)


def _why_ended(ending: Ending, limits: Limits) -> OperationError:
    """The kernel ends a process with a different signal for each limit."""
    ended_by = -ending.exit_code
    if ended_by == signal.SIGALRM:
        return _timed_out(limits)
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and ending.cpu_seconds >= limits.cpu_seconds):
        message = f"extraction used its {limits.cpu_seconds} s of processor time (cpu_seconds)"
        return Fatal(message, scope="item", code="cpu_limit")
    if ended_by == signal.SIGKILL:
        message = f"the extraction process was killed with {ending.peak_bytes // 1_000_000:,} MB in use"
        return Transient(f"{message}; the machine may have run out of memory", code="extractor_killed")
    if ending.peak_bytes > 0.8 * limits.memory_bytes:
        return _out_of_memory(limits)
    hint = (
        f"; it may need more than {limits.memory_bytes // 1_000_000:,} MB of memory (memory_bytes)"
        if ended_by in _ABORTS
        else ""
    )
    how = f"by {signal.Signals(ended_by).name}" if ended_by in set(signal.Signals) else f"with code {ending.exit_code}"
    return Fatal(f"the parser crashed: its process ended {how}{hint}", scope="item", code="extractor_crash")


def _out_of_memory(limits: Limits) -> Fatal:
    message = f"extraction needs more than {limits.memory_bytes // 1_000_000:,} MB of memory (memory_bytes)"
    return Fatal(message, scope="item", code="out_of_memory")


def _timed_out(limits: Limits) -> Transient:
    """Not final: a busy parser ends by its processor time, and one that waits may only be on a slow machine."""
    return Transient(f"extraction took longer than {limits.seconds:g} s (seconds)", code="extraction_timeout")
