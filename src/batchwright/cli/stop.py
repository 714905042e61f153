"""How a long-running command is asked to stop: by a signal, or by the end of the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import typer

from batchwright.cli.hangup import Terminal

if TYPE_CHECKING:
    from batchwright.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ECHO_SECONDS = 0.5
_ORPHAN_SECONDS = 20.0


class Stop:
    """The first signal asks to stop, the second one quits now; a closed terminal only asks, however often.

    Plain signal handlers run even while an operation keeps the event loop busy, so that the second signal works
    when it is needed most.
    """

    def __init__(
        self, *, on_ask: Callable[[int], None] | None = None, on_hard: Callable[[], None] | None = None
    ) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._asked_at: float | None = None
        self._terminal = Terminal()
        self.on_ask = on_ask
        self.on_hard = on_hard
        self.is_tethered = False
        """A child may receive the same signal twice: from its supervisor, and with its whole process group."""

    def listen(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                signal.signal(number, self._on_signal)

    def ask(self, number: int = signal.SIGTERM) -> None:
        """From any thread; asking twice changes nothing."""
        self._loop.call_soon_threadsafe(self._ask, number)

    def _ask(self, number: int) -> None:
        if not self.asked.is_set():
            self.asked.set()
            if self.on_ask is not None:
                self.on_ask(number)

    def _on_signal(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            self._terminal.detach_if_closed()
        if self._asked_at is None:
            self._asked_at = now
            self.ask(number)
        elif number == signal.SIGHUP:
            return
        elif now - self._asked_at > _ECHO_SECONDS or not (number == signal.SIGINT or self.is_tethered):
            # One Ctrl-C may arrive twice: from the terminal, and from a program between us and it.
            if self.on_hard is not None:
                self.on_hard()
            leave(128 + number)


class Tether:
    """A child's connection to the process that started it: it reports readiness, and its end stops the child.

    The kernel closes the other end however that process dies, so no child is left behind.
    """

    def __init__(self, descriptor: int, stop: Stop, grace_seconds: float) -> None:
        self._socket = socket.socket(fileno=descriptor)
        stop.is_tethered = True
        self._stop = stop
        self._grace_seconds = grace_seconds
        threading.Thread(target=self._hold, name="batchwright-tether", daemon=True).start()

    def ready(self) -> None:
        try:
            self._socket.send(b"r")
        except OSError:  # that process has ended; `_hold` notices it too
            return

    def _hold(self) -> None:
        try:
            while self._socket.recv(1):
                pass
        except OSError:
            pass
        self._stop.ask()
        time.sleep(self._grace_seconds + _ORPHAN_SECONDS)
        leave(1)


def end(code: int, settings: Settings) -> NoReturn:
    """End a command that may have used the store: a thread of a remote one may abort an interpreter that exits."""
    url = settings.storage.url
    if url is not None and not url.startswith("file:"):
        leave(code)
    raise typer.Exit(code)


@contextlib.contextmanager
def end_if_nobody_reads() -> Iterator[None]:
    """End without an error if the reader of our output has stopped, as `head` does."""
    try:
        yield
    except BrokenPipeError:
        _mute_output()
        raise typer.Exit(0) from None


@contextlib.contextmanager
def mute_if_nobody_reads(note: str | None = None) -> Iterator[None]:
    """The same for output that only accompanies a command's work: the display ends, and the work continues."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != 1:  # rich turns a closed pipe into this
            raise
        _mute_output()
        if note is not None:
            with contextlib.suppress(OSError):
                typer.echo(note, err=True)


def _mute_output() -> None:
    """Otherwise Python would report the closed pipe again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def leave(code: int) -> NoReturn:
    """End the process without waiting for any thread of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
