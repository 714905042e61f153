"""The monkey and its victims: a fleet of worker processes, and their PostgreSQL, which is stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson
import psycopg

from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import DatabaseUnavailable

Deed = Literal["kill", "stop", "terminate", "restart"]
DECK: tuple[Deed, ...] = (*["kill"] * 9, *["stop"] * 5, *["terminate"] * 5, *["restart"] * 2)
_AWAKE_MIN = 2
"""At least this many workers keep running: the time until jobs are rescued can only be measured with a rescuer."""
_AWAY_SECONDS_MAX = 30.0
_STOPPED_MAX = 2
_STOP_SECONDS_MAX = 40.0
_COUNTED = ("fenced", "leases_lost", "rescued", "poisoned")


@dataclass(slots=True, eq=False)
class Victim:
    """One worker process, from its start to its end."""

    process: asyncio.subprocess.Process
    id: str | None = None
    """The worker's id; known after its first message."""
    counts: dict[str, int] = field(default_factory=dict)
    killed_at: float | None = None
    ended_at: float | None = None
    is_stopped: bool = False
    is_dismissed: bool = False

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Fleet:
    """Keeps this number of workers alive; one that ends is replaced at once."""

    def __init__(self, folder: Path, logs: Path, *, lease_seconds: float, size: int) -> None:
        self.everybody: list[Victim] = []
        self._arguments = (str(folder), str(lease_seconds))
        self._logs = logs
        self._size = size
        self._keepers: list[asyncio.Task[None]] = []
        self._is_closing = False

    @property
    def alive(self) -> list[Victim]:
        return [victim for victim in self.everybody if victim.ended_at is None]

    @property
    def awake(self) -> list[Victim]:
        """Workers that have begun to work and are neither stopped nor about to be killed."""
        return [one for one in self.alive if one.id is not None and not one.is_stopped and one.killed_at is None]

    def counted(self) -> Counter[str]:
        """The counts of all workers together; those of a killed one lack its last quarter of a second."""
        total: Counter[str] = Counter()
        for victim in self.everybody:
            total.update({name: victim.counts.get(name, 0) for name in _COUNTED})
        return total

    def deserters(self) -> list[Victim]:
        """Workers that ended by themselves, and not because of a poison job."""
        return [
            victim
            for victim in self.everybody
            if victim.ended_at is not None and not victim.is_dismissed and victim.process.returncode != -signal.SIGKILL
        ]

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(place)) for place in range(self._size)]

    async def close(self) -> None:
        """Ask all workers to stop, as a deploy does; kill those that do not."""
        self._is_closing = True
        for victim in self.alive:
            victim.is_dismissed = True
            victim.signal(signal.SIGCONT)
            victim.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.gather(*self._keepers), _STOP_SECONDS_MAX)
        except TimeoutError:
            self.kill()
            await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        self._is_closing = True
        for victim in self.alive:
            victim.signal(signal.SIGKILL)

    async def _keep(self, place: int) -> None:
        while not self._is_closing:
            victim = await self._hire(place)
            try:
                await self._listen(victim)
            finally:
                if victim.process.returncode is None:
                    victim.signal(signal.SIGKILL)
                await victim.process.wait()
                victim.ended_at = time.time()

    async def _hire(self, place: int) -> Victim:
        with (self._logs / f"worker-{place}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.chaos.worker", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        victim = Victim(process)
        self.everybody.append(victim)
        return victim

    @staticmethod
    async def _listen(victim: Victim) -> None:
        assert victim.process.stdout is not None
        async for line in victim.process.stdout:
            with contextlib.suppress(orjson.JSONDecodeError):
                words = orjson.loads(line)
                victim.id, victim.counts = words["id"], words["counts"]
        await victim.process.wait()


class Monkey:
    """Does one deed after the other, drawn from a shuffled deck; the same seed draws the same deeds."""

    def __init__(
        self, fleet: Fleet, postgres: EmbeddedPostgres, *, lease_seconds: float, seed: int, say: Callable[[str], None]
    ) -> None:
        self.done: Counter[Deed] = Counter()
        self.outages: list[tuple[float, float]] = []
        """When PostgreSQL was stopped, and when it answered again."""
        self.revived_by_workers = 0
        self._fleet = fleet
        self._lease_seconds = lease_seconds
        self._postgres = postgres
        self._random = random.Random(f"monkey {seed}")
        self._say = say
        self._wakers: set[asyncio.Task[None]] = set()

    async def play(self, seconds: float) -> None:
        """Run for this time, and until each deed was done once: on a busy machine restarts may take most of it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        deck: list[Deed] = []
        while loop.time() < until or (self._undone and loop.time() < until + seconds):
            if not deck:
                deck = self._random.sample(DECK, len(DECK)) if loop.time() < until else self._undone
            await self._do(deck.pop())
            await asyncio.sleep(min(self._random.uniform(0.5, 3.0), max(0.0, until - loop.time())))
        for waker in self._wakers:
            waker.cancel()
        await asyncio.gather(*self._wakers, return_exceptions=True)

    @property
    def _undone(self) -> list[Deed]:
        return [deed for deed in dict.fromkeys(DECK) if not self.done[deed]]

    async def _do(self, deed: Deed) -> None:
        match deed:
            case "kill":
                self._kill()
            case "stop":
                self._stop()
            case "terminate":
                await asyncio.to_thread(self._terminate)
            case "restart":
                await self._restart()

    def _kill(self) -> None:
        victims = [victim for victim in self._fleet.alive if victim.id is not None and victim.killed_at is None]
        if len(self._fleet.awake) < _AWAKE_MIN:
            return
        victim = self._random.choice(victims)
        victim.killed_at = time.time()
        victim.signal(signal.SIGKILL)
        self.done["kill"] += 1
        self._say(f"SIGKILL {victim.process.pid}")

    def _stop(self) -> None:
        """Stop a worker for longer than a lease, and sometimes longer than the limit of an idle transaction."""
        if (
            sum(victim.is_stopped for victim in self._fleet.alive) >= _STOPPED_MAX
            or len(self._fleet.awake) < _AWAKE_MIN
        ):
            return
        victim = self._random.choice(self._fleet.awake)
        is_long = self._random.random() < 0.15
        seconds = self._random.uniform(11, 13) if is_long else self._lease_seconds * self._random.uniform(1.1, 2.2)
        victim.is_stopped = True
        victim.signal(signal.SIGSTOP)
        self.done["stop"] += 1
        self._say(f"SIGSTOP {victim.process.pid} for {seconds:.1f} s")
        waker = asyncio.create_task(self._wake(victim, seconds))
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self, victim: Victim, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            victim.signal(signal.SIGCONT)
            victim.is_stopped = False

    def _terminate(self) -> None:
        """Cut one to three connections of any kind: of claims, settles, leases, the doorbell, or our own."""
        count = self._random.choice((1, 1, 2, 3))
        sql = """
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE application_name = 'batchwright' AND pid <> pg_backend_pid() ORDER BY random() LIMIT %s
        """
        with contextlib.suppress(psycopg.Error), psycopg.connect(self._postgres.url, autocommit=True) as admin:
            ended = len(admin.execute(sql, [count]).fetchall())
            self.done["terminate"] += ended
            self._say(f"terminated {ended} connections")

    async def _restart(self) -> None:
        """Stop it like a power cut; then restart it, or let the workers do that."""
        by_workers = self._random.random() < 0.5
        pause = self._random.uniform(0.0, 1.0)
        stopped_at = time.time()
        with contextlib.suppress(DatabaseUnavailable):  # a worker was just starting it
            await asyncio.to_thread(self._postgres.pg_ctl, "stop", "-m", "immediate", "-w", "-t", "20")
        await asyncio.sleep(pause)
        if not by_workers:
            await asyncio.to_thread(self._postgres.ensure_running)
        await asyncio.to_thread(self._await_answer)
        self.outages.append((stopped_at, time.time()))
        self.done["restart"] += 1
        self.revived_by_workers += by_workers
        by = "the workers" if by_workers else "the harness"
        self._say(f"PostgreSQL restarted by {by}, away for {time.time() - stopped_at:.1f} s")

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _AWAY_SECONDS_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(psycopg.Error):
                return psycopg.connect(self._postgres.url, connect_timeout=5).close()
            time.sleep(0.02)
        self._say("the workers did not bring PostgreSQL back")
        return self._postgres.ensure_running()


def environment() -> dict[str, str]:
    """Our environment, without settings that would change those of the workers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    root = str(Path(__file__).parents[2])
    return {**kept, "PYTHONPATH": os.pathsep.join([root, *filter(None, [kept.get("PYTHONPATH")])])}
