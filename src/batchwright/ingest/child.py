"""The process that runs extractors. It forks for every document: each has fresh limits and leaves no state behind.

    worker ── request ──▶ fork server ── fork ──▶ extractor (limits, one document, exits)
           ◀── ending and answer ──       ◀── answer by pipe, ending by wait ──

The fork server has the parsers loaded and runs no parser itself, so it survives whatever they do.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from batchwright.errors import ConfigurationError, Fatal, OperationError, Transient
from batchwright.ingest.extract.dispatch import extract_document, load_extractor
from batchwright.ingest.extract.document import Document
from batchwright.ingest.limits import Limits
from batchwright.ingest.messages import LENGTH, Answer, Ending, Failure, Request
from batchwright.ingest.text import CanonicalText, text_too_large

_LIBRARIES = ("pypdfium2", "selectolax.lexbor")
_MESSAGE_CHARACTERS_MAX = 500
_READ_BYTES = 1 << 20
_ROOM_TO_REPORT_BYTES = 64_000_000


def serve(requests: BinaryIO, endings: BinaryIO, preload: list[str]) -> None:
    """Process one document at a time until the worker closes the pipe."""
    _load_parsers(preload)
    gc.freeze()
    while header := requests.read(LENGTH.size):
        request = msgspec.msgpack.decode(requests.read(*LENGTH.unpack(header)), type=Request)
        ending, answer = _run_in_fork(request)
        packed = msgspec.msgpack.encode(ending)
        endings.write(LENGTH.pack(len(packed)) + packed)
        endings.write(answer)
        endings.flush()


def _load_parsers(extractors: list[str]) -> None:
    """Load the parsers once, not for each document. A missing parser only causes an error when a document needs it."""
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    for path in extractors:
        with suppress(ImportError, AttributeError):
            load_extractor(path)


def _run_in_fork(request: Request) -> tuple[Ending, bytearray]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _extract_and_exit(request, writing)
    os.close(writing)
    answer = bytearray()
    while (piece := os.read(reading, _READ_BYTES)) and len(answer) <= request.limits.output_bytes:
        answer += piece
    os.close(reading)
    is_too_large = len(answer) > request.limits.output_bytes
    if is_too_large:
        os.kill(child, signal.SIGKILL)
        answer.clear()
    _, status, usage = os.wait4(child, 0)
    ending = Ending(
        answer_bytes=len(answer),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        exit_code=os.waitstatus_to_exitcode(status),
        is_answer_too_large=is_too_large,
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )
    return ending, answer


def _extract_and_exit(request: Request, writing: int) -> None:
    """Never returns: whatever happens, the fork must not continue as a second server."""
    code = 1
    try:
        _silence()
        _limit(request.limits)
        answer = memoryview(msgspec.msgpack.encode(_extract(request)))
        while answer:
            answer = answer[os.write(writing, answer) :]
        code = 0
    finally:
        os._exit(code)


def _silence() -> None:
    """Detach from the server's pipes and discard what a parser prints, which may be a document's text."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _limit(limits: Limits) -> None:
    """Set the limits. For wall time, a signal ends the process even inside a parser that never returns to Python."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes + _ROOM_TO_REPORT_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)


def _extract(request: Request) -> Answer:
    try:
        return Answer(text=_read_and_extract(request))
    except OperationError as error:
        return Answer(failure=Failure(kind=error.kind, code=error.code, message=_shorten(str(error))))
    except ConfigurationError as error:
        return Answer(failure=Failure(kind="configuration", code=None, message=str(error)))
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        return Answer(failure=Failure(kind="memory", code=None, message=""))
    except Exception as error:
        message = _shorten(f"{type(error).__name__}: {error}")
        return Answer(failure=Failure(kind="fatal", code="extractor_error", message=message))


def _read_and_extract(request: Request) -> CanonicalText:
    document = Document(data=_read(request), name=request.name, limits=request.limits, extractors=request.extractors)
    text = extract_document(document)
    if len(text.text.encode()) > request.limits.output_bytes:
        raise text_too_large(request.limits.output_bytes)
    return text


def _read(request: Request) -> bytes:
    limit = request.limits.document_bytes
    try:
        with Path(request.path).open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Transient(f"the document cannot be read: {error.strerror}", code="document_unreadable") from error
    if len(data) > limit:
        message = f"the document is larger than {limit:,} bytes (document_bytes)"
        raise Fatal(message, scope="item", code="document_too_large")
    return data


def _shorten(message: str) -> str:
    """Make a message safe to send: surrogates cannot be sent, and a parser's message may quote half a document."""
    return message.encode("utf-8", "replace").decode()[:_MESSAGE_CHARACTERS_MAX]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, sys.argv[1:])
    except BrokenPipeError:  # the worker was killed
        os._exit(0)
