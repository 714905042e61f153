"""The processes of the batch chaos, and the monkey that kills them: workers, the HTTP server, and PostgreSQL itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import psycopg

from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import DatabaseUnavailable
from tests.chaos.monkey import environment
from tests.perturb import SEED

Deed = Literal["worker", "workers", "api", "postgres", "everything", "stop"]
Phase = Literal["uploading", "creating", "validating", "in_progress", "finalizing", "ended"]
Kind = Literal["worker", "api"]
Span = tuple[float, float]

Ambushes = Mapping[Phase, tuple[float, Sequence[Deed]]]
"""Short phases that random kills would miss: in each of them these deeds are done once, with this pause between."""
_AWAY_SECONDS_MAX = 30.0
_BREATH_SECONDS = 0.1
_CLOSE_SECONDS_MAX = 20.0
_PATIENCE_SECONDS = 3.0
"""How long a deed waits for a victim; after that it may also hit the last running worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A place in a fleet: the command that runs there, and is restarted when it ends."""

    kind: Kind
    command: Sequence[str]
    """The arguments of `python -m`; the tether is added to them. `{name}` is a new name at every start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: Sequence[str] = ()
    """What is put before `python`: a program that executes it, e.g. in another namespace."""


def posts(config: Path, *, perturbed: int | None = None, workers: int = 2) -> list[Post]:
    """Workers and the HTTP server. With a seed the workers are perturbed, differently at every start."""
    settings = ("--config", str(config))
    worker = Post(kind="worker", command=("batchwright", "worker", *settings))
    if perturbed is not None:
        command = ("tests.perturbed.process", "{name}", "worker", *settings)
        worker = Post(kind="worker", command=command, environment={SEED: str(perturbed)})
    return [*[worker] * workers, Post(kind="api", command=("tests.chaos.api", *settings))]


@dataclass(slots=True, eq=False)
class Victim:
    """One process, from its start to its end."""

    kind: Kind
    process: asyncio.subprocess.Process
    started_at: float
    ready_at: float | None = None
    killed_at: float | None = None
    ended_at: float | None = None
    is_dismissed: bool = False
    stops: list[Span] = field(default_factory=list)
    place: int = 0

    @property
    def is_awake(self) -> bool:
        """Whether it has begun to work, and is neither stopped nor about to be killed."""
        is_stopped = any(until > time.time() for _, until in self.stops)
        return self.ready_at is not None and self.killed_at is None and self.ended_at is None and not is_stopped

    @property
    def awake(self) -> list[Span]:
        """The periods in which it worked; without those in which it was stopped."""
        if self.ready_at is None:
            return []
        ends = [one for one in (self.killed_at, self.ended_at) if one is not None]
        edges = [self.ready_at, *(edge for stop in self.stops for edge in stop), min(ends, default=float("inf"))]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Fleet:
    """Workers and HTTP servers; one that ends is replaced at once. They keep their files in `folder`."""

    def __init__(self, posts: Sequence[Post], folder: Path, logs: Path) -> None:
        self.everybody: list[Victim] = []
        self._posts = posts
        self._folder = folder
        self._logs = logs
        self._keepers: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._vacant: set[int] = set()

    def awake(self, kind: str) -> list[Victim]:
        return [one for one in self.everybody if one.kind == kind and one.is_awake]

    def deserters(self, outages: Sequence[Span]) -> list[Victim]:
        """Processes that ended by themselves. One that found no database at its start may: it is started again."""
        return [
            one
            for one in self.everybody
            if one.ended_at is not None
            and not one.is_dismissed
            and one.killed_at is None
            and not (one.ready_at is None and overlaps((one.started_at, one.ended_at), outages))
        ]

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(place, post)) for place, post in enumerate(self._posts)]

    async def ready(self) -> None:
        """Wait until all processes have begun to work."""
        while len({one.place for one in self.everybody if one.is_awake}) < len(self._posts):
            await asyncio.sleep(_BREATH_SECONDS)

    def kill(self, victim: Victim, *, for_good: bool = False) -> None:
        """With SIGKILL; for good means that nobody takes its place."""
        if for_good:
            self._vacant.add(victim.place)
        victim.killed_at = time.time()
        victim.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Ask all processes to stop, as a deploy does; kill those that do not."""
        self._is_closing = True
        for victim in self._alive():
            victim.is_dismissed = True
            victim.signal(signal.SIGCONT)
            victim.signal(signal.SIGTERM)
        done, late = await asyncio.wait(self._keepers, timeout=_CLOSE_SECONDS_MAX)
        for victim in self._alive():
            victim.signal(signal.SIGKILL)
        await asyncio.gather(*done, *late, return_exceptions=True)
        await asyncio.to_thread(self._end_loners)

    def _alive(self) -> list[Victim]:
        return [victim for victim in self.everybody if victim.ended_at is None]

    def _end_loners(self) -> None:
        """Processes that outlive their worker, because a job runs alone in them; found by the name of our folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self._folder) in process.environ().get("BATCHWRIGHT_CHILD", ""):
                    process.kill()

    async def _keep(self, place: int, post: Post) -> None:
        while not self._is_closing and place not in self._vacant:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                victim = await self._hire(place, post, theirs)
                theirs.close()
                try:
                    await asyncio.gather(_await_ready(victim, ours), victim.process.wait())
                finally:
                    if victim.process.returncode is None:
                        victim.signal(signal.SIGKILL)
                        await victim.process.wait()
                    victim.ended_at = time.time()
            await asyncio.sleep(_BREATH_SECONDS)

    async def _hire(self, place: int, post: Post, theirs: socket.socket) -> Victim:
        """Start it with one end of a tether; it exits when our end is closed, however we die."""
        name = f"{post.kind} {place}.{len(self.everybody)}"
        command = [name if part == "{name}" else part for part in post.command]
        with (self._logs / f"{post.kind}-{place}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*post.launcher, sys.executable, "-m", *command, "--tether", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment(), **post.environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        victim = Victim(post.kind, process, time.time(), place=place)
        self.everybody.append(victim)
        return victim


async def _await_ready(victim: Victim, ours: socket.socket) -> None:
    ours.setblocking(False)
    with contextlib.suppress(ConnectionError):
        if await asyncio.get_running_loop().sock_recv(ours, 1):
            victim.ready_at = time.time()


class Scene:
    """The phase of the batch; it wakes those that wait for one."""

    def __init__(self) -> None:
        self.phase: Phase = "uploading"
        self.since: dict[Phase, float] = {}
        self._changed = asyncio.Condition()

    def begin(self) -> None:
        self.since["uploading"] = time.time()

    @property
    def is_over(self) -> bool:
        return "ended" in self.since

    async def enter(self, phase: Phase) -> None:
        if phase not in self.since:
            async with self._changed:
                self.phase = phase
                self.since[phase] = time.time()
                self._changed.notify_all()

    async def reached(self, phase: Phase) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: phase in self.since)


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL."""

    at: float
    deed: Deed
    phase: Phase
    pid: int


class Monkey:
    """Draws deeds from a shuffled deck, and waits for the short phases; the same seed draws the same deeds."""

    def __init__(
        self,
        fleet: Fleet,
        postgres: EmbeddedPostgres,
        scene: Scene,
        *,
        ambushes: Ambushes,
        deck: Sequence[Deed],
        draws_from: Phase,
        kills_max: int,
        lease_seconds: float,
        pause_seconds: Span,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.kills: list[Kill] = []
        self.outages: list[Span] = []
        """When PostgreSQL was killed, and when it answered again."""
        self.revived_by_others = 0
        self.stopped = 0
        self._ambushes = ambushes
        self._deck = deck
        self._draws_from = draws_from
        self._fleet = fleet
        self._kills_max = kills_max
        self._lease_seconds = lease_seconds
        self._pause_seconds = pause_seconds
        self._postgres = postgres
        self._random = random.Random(f"batch monkey {seed}")
        self._say = say
        self._scene = scene
        self._restarting = asyncio.Lock()
        self._wakers: set[asyncio.Task[None]] = set()

    @property
    def counted(self) -> Counter[Deed]:
        return Counter(kill.deed for kill in self.kills)

    @property
    def is_playing(self) -> bool:
        return not self._scene.is_over and len(self.kills) < self._kills_max

    async def play(self) -> None:
        """Run until the batch has ended."""
        ambushes = [asyncio.create_task(self._lie_in_wait(phase)) for phase in self._ambushes]
        drawing = asyncio.create_task(self._draw())
        try:
            await self._scene.reached("ended")
        finally:
            tasks = [*ambushes, drawing, *self._wakers]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _draw(self) -> None:
        deck: list[Deed] = []
        await self._scene.reached(self._draws_from)
        while self.is_playing:
            deck = deck or self._random.sample(self._deck, len(self._deck))
            await asyncio.sleep(self._random.uniform(*self._pause_seconds))
            await self._do(deck.pop())

    async def _lie_in_wait(self, phase: Phase) -> None:
        seconds, deeds = self._ambushes[phase]
        await self._scene.reached(phase)
        for deed in deeds:
            await asyncio.sleep(self._random.uniform(0.0, seconds))
            await self._do(deed)

    async def _do(self, deed: Deed) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not await self._has_done(deed):
            if time.monotonic() > until:
                await self._has_done("workers" if deed == "worker" else deed)
                return
            await asyncio.sleep(0.02)

    async def _has_done(self, deed: Deed) -> bool:
        """False if there was no victim."""
        workers = self._fleet.awake("worker")
        match deed:
            case "worker" if len(workers) > 1:
                self._kill("worker", self._random.choice([workers[0], *workers]))  # the oldest holds most shards
            case "workers" if workers:
                for worker in workers:
                    self._kill("worker", worker)
            case "api" if servers := self._fleet.awake("api"):
                self._kill("api", servers[0])
            case "stop" if len(workers) > 1:
                self._stop(self._random.choice(workers))
            case "postgres":
                async with self._restarting:
                    return await self._kill_postgres()
            case "everything":
                for victim in (*workers, *self._fleet.awake("api")):
                    self._kill(victim.kind, victim)
                return await self._has_done("postgres")
            case _:
                return False
        return True

    def _kill(self, deed: Deed, victim: Victim) -> None:
        self._fleet.kill(victim)
        self._note(deed, victim.process.pid)

    def _stop(self, victim: Victim) -> None:
        """Stop it for longer than a lease: when it continues, others have its shards, and it does not know that yet."""
        seconds = self._lease_seconds * self._random.uniform(1.4, 2.2)
        victim.stops.append((time.time(), time.time() + seconds))
        victim.signal(signal.SIGSTOP)
        self.stopped += 1
        self._say(f"SIGSTOP worker {victim.process.pid} for {seconds:.1f} s")
        waker = asyncio.create_task(self._wake(victim, seconds))
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self, victim: Victim, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            victim.signal(signal.SIGCONT)

    async def _kill_postgres(self) -> bool:
        """Kill all of its processes at once; then restart it, or let the workers do that."""
        by_others = self._random.random() < 0.5
        pause = self._random.uniform(0.0, 1.0)
        killed_at = time.time()
        postmaster = await asyncio.to_thread(self._cut_off)
        if postmaster is None:
            return False
        self._note("postgres", postmaster)
        try:
            await asyncio.sleep(pause)
            if not by_others:
                await asyncio.to_thread(self._revive)
            await asyncio.to_thread(self._await_answer)
        finally:
            self.outages.append((killed_at, time.time()))
        self.revived_by_others += by_others
        by = "the others" if by_others else "the harness"
        self._say(f"PostgreSQL was started again by {by}, away for {time.time() - killed_at:.1f} s")
        return True

    def _cut_off(self) -> int | None:
        """The postmaster first, so that it does not see others die; None if it does not run now."""
        try:
            pid = int((self._postgres.data_folder / "postmaster.pid").read_text().split("\n", 1)[0])
            postmaster = psutil.Process(pid)
            doomed = [postmaster, *postmaster.children(recursive=True)]
        except (FileNotFoundError, ValueError, psutil.Error):
            return None
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return pid

    def _revive(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):  # another process was just starting it
            self._postgres.ensure_running()

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _AWAY_SECONDS_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(psycopg.Error):
                return psycopg.connect(self._postgres.url, connect_timeout=5).close()
            time.sleep(0.02)
        self._say("nobody brought PostgreSQL back")
        return self._postgres.ensure_running()

    def _note(self, deed: Deed, pid: int) -> None:
        self.kills.append(Kill(time.time(), deed, self._scene.phase, pid))
        self._say(f"SIGKILL {len(self.kills)}: {deed} {pid} while {self._scene.phase}")


def overlaps(span: Span, others: Sequence[Span]) -> bool:
    return any(since < span[1] and span[0] < until for since, until in others)


def free_port() -> int:
    """A port that was free a moment ago: a killed server must be restarted at the same address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def pid_of(worker_id: str | None) -> int:
    """Worker ids are host, process and boot."""
    parts = (worker_id or "").rsplit(":", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else -1
