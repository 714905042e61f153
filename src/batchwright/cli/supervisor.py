"""Starts several worker processes, replaces those that die, and forwards signals to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from batchwright.cli.stop import Stop

log = logging.getLogger(__name__)

_PAUSE_SECONDS_MIN = 0.2
_PAUSE_SECONDS_MAX = 30.0
_HEALTHY_SECONDS = 60.0
_LAST_SECONDS = 30.0


class Supervisor:
    """Keeps several `batchwright worker` with these arguments running until `stop` is asked. Returns the exit code.

    A child that dies is replaced, with longer pauses if it keeps dying. If one exits with an error before any of them
    was ready, the configuration is wrong, and the supervisor stops.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        processes: int,
        stop: Stop,
        *,
        environment: Callable[[int], Mapping[str, str]],
        grace_seconds: float,
    ) -> None:
        self._command = (sys.executable, "-P", "-m", "batchwright", "worker")
        self._arguments = arguments
        self._processes = processes
        self._stop = stop
        self._environment = environment
        self._grace_seconds = grace_seconds
        self._children: set[asyncio.subprocess.Process] = set()
        self.ready = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        self._stop.on_ask, self._stop.on_hard = self._forward, self._kill
        ours, theirs = socket.socketpair()
        asyncio.get_running_loop().add_reader(ours, self._note_ready, ours)
        try:
            await asyncio.gather(*(self._keep_running(theirs.fileno(), number) for number in range(self._processes)))
        finally:
            self._kill()
            asyncio.get_running_loop().remove_reader(ours)
            ours.close()
            theirs.close()
        return self._code

    async def _keep_running(self, tether: int, number: int) -> None:
        pause = _PAUSE_SECONDS_MIN
        while not self._stop.asked.is_set():
            began = time.monotonic()
            code = await self._run_one(tether, number)
            if self._stop.asked.is_set():
                return
            if code > 0 and not self.ready.is_set():
                self._give_up(code)
                return
            pause = _PAUSE_SECONDS_MIN if time.monotonic() - began > _HEALTHY_SECONDS else pause
            log.warning("a worker process ended (%s); the next one starts in %.1f s", _describe_exit(code), pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.asked.wait(), pause)
            pause = min(_PAUSE_SECONDS_MAX, pause * 2)

    async def _run_one(self, tether: int, number: int) -> int:
        """Run a child in a separate session: a Ctrl-C on the terminal must reach it once, through us."""
        child = await asyncio.create_subprocess_exec(
            *self._command,
            "--tether",
            str(tether),
            *self._arguments,
            env=dict(self._environment(number)),
            pass_fds=[tether],
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
        )
        self._children.add(child)
        if self._stop.asked.is_set():  # stop was requested while this child was being started
            _signal(child, signal.SIGTERM)
        try:
            return await self._wait_for_end(child)
        finally:
            self._children.discard(child)

    async def _wait_for_end(self, child: asyncio.subprocess.Process) -> int:
        ended = asyncio.create_task(child.wait())
        asked = asyncio.create_task(self._stop.asked.wait())
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        done, _ = await asyncio.wait([ended], timeout=self._grace_seconds + _LAST_SECONDS)
        if not done:
            log.error("worker process %d did not end in time and is killed", child.pid)
            _signal(child, signal.SIGKILL)
        return await ended

    def _give_up(self, code: int) -> None:
        """Stop everything. The child has reported on standard error what is wrong."""
        self._code = code
        self._stop.ask()

    def _note_ready(self, ours: socket.socket) -> None:
        if ours.recv(64):
            self.ready.set()

    def _forward(self, number: int) -> None:
        if n := len(self._children):
            log.info("stopping %d worker process%s; a second signal quits now", n, "" if n == 1 else "es")
        for child in list(self._children):
            _signal(child, number)

    def _kill(self) -> None:
        for child in list(self._children):
            _signal(child, signal.SIGKILL)


def _signal(child: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
