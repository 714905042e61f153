"""The perturbed mode delays every call that leaves the process, and wakes tasks in random order.

    statement · transaction · object store · model server, webhooks, providers    delayed before and after, 0 to 50 ms
    event loop                                                                    wakes ready tasks in any order

A seed alone decides the delays, so a failure can be repeated. The seed of a test is the seed of the run and the name
of the test. Each statement and each call has its own sequence of delays, so other calls do not change it.

    BATCHWRIGHT_PERTURB=1        turns the mode on for all tests; tests that are marked `timed` are deselected
    BATCHWRIGHT_PERTURB_SEED=7   turns it on with this seed
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import shlex
import signal
import sys
import threading
import time
from asyncio import events
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from batchwright.db.database import Blocking, ConnectionSession, Pool, Transaction
from batchwright.inference.gateway import Gateway
from batchwright.inference.http import Http
from batchwright.storage.local import Local
from batchwright.storage.remote import Remote

DELAY_SECONDS_MAX = 0.05
FIXED_SEED = 2026
MODE = "BATCHWRIGHT_PERTURB"
SEED = "BATCHWRIGHT_PERTURB_SEED"
LONG = "BATCHWRIGHT_TEST_PERTURB_LONG"
"""Makes the tests of tests/perturbed, which are always perturbed, several times as large."""
UNTIL = "BATCHWRIGHT_TEST_PERTURB_UNTIL"
"""When to end, in seconds since 1970: tests that have not begun by then are skipped."""
FAILURES = "BATCHWRIGHT_TEST_PERTURB_FAILURES"
"""A file: for each test that fails, the command that repeats it is appended."""
_ALARM_SECONDS = 10.0
_RANDOM = "BATCHWRIGHT_TEST_PERTURB_RANDOM"
_STORE_CALLS = ("adopt", "delete", "head", "read", "sweep", "write")
_TIMEOUT_SECONDS = 600


class Perturbation:
    """The delays, and the order of tasks, for one seed."""

    def __init__(self, seed: str, seconds_max: float = DELAY_SECONDS_MAX) -> None:
        self.seed = seed
        self._seconds_max = seconds_max
        self._chances: dict[str, random.Random] = {}

    def delays(self, call: str) -> tuple[float, float]:
        """How long to wait before the call, and how long after it."""
        chance = self._chance(call)
        seconds, share = chance.uniform(0.0, self._seconds_max), chance.random()
        return seconds * share, seconds * (1.0 - share)

    def reorder(self, ready: Iterable[asyncio.Handle]) -> Iterator[asyncio.Handle]:
        """Shuffle each run of consecutive tasks.

        Other callbacks keep their places, and no task moves past one: asyncio promises to run callbacks of `call_soon`
        in the order of the calls.
        """
        chance = self._chance(f"wake {threading.current_thread().name}")
        for is_wake_up, run in itertools.groupby(ready, _wakes_a_task):
            handles = list(run)
            if is_wake_up:
                chance.shuffle(handles)
            yield from handles

    def _chance(self, what: str) -> random.Random:
        if what not in self._chances:
            self._chances[what] = random.Random(f"{self.seed} {what}")
        return self._chances[what]


_active: list[Perturbation] = []
"""Perturbations that are nested; the last one applies."""


class PerturbedLoop(asyncio.SelectorEventLoop):
    """Wakes tasks in the order of the perturbation in force."""

    def _run_once(self) -> None:
        ready: Any = self._ready
        if _active and len(ready) > 1:
            # Other threads may append meanwhile, but only this one removes callbacks.
            handles = [ready.popleft() for _ in range(len(ready))]
            ready.extendleft(reversed(list(_active[-1].reorder(handles))))
        super()._run_once()


def _wakes_a_task(handle: asyncio.Handle) -> bool:
    """Whether this is a step of a task; `call_soon(task.cancel)` is not."""
    callback: Any = handle._callback
    if not isinstance(getattr(callback, "__self__", None), asyncio.Task):
        return False
    name = getattr(callback, "__name__", type(callback).__name__).lower()
    return "step" in name or "wakeup" in name


# Slow calls -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def perturbed(seed: str) -> Iterator[Perturbation]:
    """Perturb this process: all its threads, and the event loops that are made from now on."""
    perturbation = Perturbation(seed)
    with pytest.MonkeyPatch.context() as patch:
        if not _active:
            _install(patch)
        _active.append(perturbation)
        try:
            yield perturbation
        finally:
            _active.remove(perturbation)


@contextlib.contextmanager
def perturbed_process(name: str) -> Iterator[None]:
    """Perturb a process that a perturbed run has started, with the seed of the run and the process's name."""
    if not is_on():
        yield
        return
    with perturbed(f"{run_seed()} {name}"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "uvloop", None)  # commands run on the event loop of Python itself without it
        yield


def _install(patch: pytest.MonkeyPatch) -> None:
    for module in (asyncio, events):
        patch.setattr(module, "new_event_loop", PerturbedLoop)
    for kind in (ConnectionSession, Blocking, Pool, Transaction):
        patch.setattr(kind, "rows", _slow(kind.rows))
    for kind in (Blocking, Pool):
        patch.setattr(kind, "transaction", _slow_transaction(kind.transaction))
    for kind in (Local, Remote):
        for name in _STORE_CALLS:
            patch.setattr(kind, name, _slow(getattr(kind, name), f"{kind.__name__}.{name}"))
        patch.setattr(kind, "pages", _slow_pages(kind.pages))
    patch.setattr(Gateway, "send", _slow(Gateway.send, "Gateway.send"))
    patch.setattr(Http, "_send", _slow(Http._send, "Http._send"))


def _slow(call: Callable[..., Awaitable[Any]], name: str | None = None) -> Callable[..., Awaitable[Any]]:
    """Delay a call before it begins, and before it answers or fails. The delays of a statement depend on its text."""

    @functools.wraps(call)
    async def slow(self: object, *args: Any, **options: Any) -> Any:
        before, after = _delays(name or f"{type(self).__name__} {args[0]}")
        await _wait(self, before)
        try:
            answer = await call(self, *args, **options)
        except Exception:
            await _wait(self, after)
            raise
        await _wait(self, after)
        return answer

    return slow


def _slow_transaction(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Wait before and after BEGIN, before COMMIT, with all locks held, and after COMMIT."""

    @contextlib.asynccontextmanager
    async def slow(self: object) -> AsyncIterator[Any]:
        before, after = _delays("BEGIN")
        await _wait(self, before)
        async with begin(self) as session:
            await _wait(self, after)
            yield session
            before, after = _delays("COMMIT")
            await _wait(self, before)
        await _wait(self, after)

    return slow


def _slow_pages(pages: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(pages)
    async def slow(self: object, *args: Any) -> AsyncIterator[Any]:
        async for page in pages(self, *args):
            await _wait(self, sum(_delays("pages")))
            yield page

    return slow


def _delays(call: str) -> tuple[float, float]:
    return _active[-1].delays(call) if _active else (0.0, 0.0)


async def _wait(what: object, seconds: float) -> None:
    """Blocking connections block their thread, as they do outside of tests."""
    if isinstance(what, ConnectionSession):
        what = what._connection
    if isinstance(what, (Blocking, psycopg.Connection)):
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


# Tests ------------------------------------------------------------------------------------------------------------


def is_on() -> bool:
    """Whether all tests are perturbed, not only those in tests/perturbed."""
    return os.environ.get(MODE) == "1" or SEED in os.environ


def run_seed() -> int:
    """The seed that was asked for, or a random one."""
    return int(os.environ.get(SEED) or os.environ[_RANDOM])


def current_seed() -> str:
    """The seed of the test that runs, for its own random choices."""
    return _active[-1].seed


def repeat(nodeid: str, seed: int) -> str:
    """The command that repeats a test with the same delays."""
    variables = [f"{LONG}=1"] if LONG in os.environ else []
    if seed != FIXED_SEED or is_on():
        variables.append(f"{SEED}={seed}")
    return " ".join([*variables, "pytest", shlex.quote(nodeid)])


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, which xdist's workers inherit, and lift hypothesis's time limits, which delays would exceed."""
    os.environ.setdefault(_RANDOM, str(random.SystemRandom().randrange(1_000_000)))
    if is_on():
        import hypothesis  # here, because perturbed processes never need it

        hypothesis.settings.register_profile(MODE, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
        hypothesis.settings.load_profile(MODE)


def pytest_report_header() -> str:
    return f"perturbed: {'all tests' if is_on() else 'tests/perturbed'}, {SEED}={run_seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In this mode, deselect tests that measure time, and shuffle the files, because a run may end early."""
    if not is_on():
        return
    timed = [item for item in items if item.get_closest_marker("timed") is not None]
    config.hook.pytest_deselected(items=timed)
    kept = [item for item in items if item.get_closest_marker("timed") is None]
    items[:] = sorted(kept, key=lambda item: random.Random(f"{run_seed()} {item.path.name}").random())
    for item in items:
        item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("the time is over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Perturb a test together with its fixtures."""
    seed = _seed_of(item)
    with contextlib.nullcontext() if seed is None else perturbed(f"{seed} {item.nodeid}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Repeat the alarm of a test that times out: the first may be raised in a task that nobody awaits, and get lost."""
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    if seconds and _seed_of(item) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_SECONDS)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Add the command that repeats the test to the report of a failure."""
    report = yield
    if report.failed and (seed := _seed_of(item)) is not None:
        command = repeat(item.nodeid, seed)
        report.sections.append(("perturbed", f"repeat with: {command}"))
        if path := os.environ.get(FAILURES):
            with Path(path).open("a") as file:
                file.write(f"{command}\n")
    return report


def _seed_of(item: pytest.Item) -> int | None:
    """The seed of a test; None if it is not perturbed."""
    marker = item.get_closest_marker("perturbed")
    if marker is None:
        return run_seed() if is_on() else None
    return FIXED_SEED if marker.args == ("fixed",) else run_seed()
