"""The perturbed mode itself: what it delays, which order it changes and which it keeps, and that a seed repeats it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from batchwright.db.database import Blocking, Pool, complete
from batchwright.inference.gateway import Gateway, Request
from batchwright.inference.settings import GatewaySettings
from batchwright.simulator import running
from batchwright.storage.local import Local
from tests import perturb
from tests.perturb import Perturbation, PerturbedLoop, perturbed
from tests.support import DATABASE


@pytest.fixture
def calls(monkeypatch):
    """The delayed calls, in order; nothing really waits."""
    seen = []

    def remember(call):
        seen.append(call)
        return 0.0, 0.0

    monkeypatch.setattr(perturb, "_delays", remember)
    with perturbed("calls"):
        yield seen


def on_a_perturbed_loop(main, seed="7"):
    with perturbed(seed), asyncio.Runner() as runner:
        assert isinstance(runner.get_loop(), PerturbedLoop)
        return runner.run(main())


async def woken():
    """The order in which twenty tasks come to their second step, after one event has woken all of them."""
    begin, order = asyncio.Event(), []

    async def wait(n):
        await begin.wait()
        order.append(n)

    tasks = [asyncio.create_task(wait(n)) for n in range(20)]
    await asyncio.sleep(0)
    begin.set()
    await asyncio.gather(*tasks)
    return order


def test_tasks_wake_in_an_order_that_follows_from_the_seed():
    first, second, other = (on_a_perturbed_loop(woken, seed) for seed in ("7", "7", "8"))
    assert first == second
    assert first != other
    assert first != sorted(first)


def test_callbacks_keep_their_order_and_no_task_moves_past_one():
    """A task that is created before a callback is scheduled begins before it, as asyncio promises."""

    async def main():
        order, loop = [], asyncio.get_running_loop()

        async def note(n):
            order.append(n)

        tasks = []
        for n in range(20):
            tasks += [asyncio.create_task(note(4 * n)), asyncio.create_task(note(4 * n + 1))]
            loop.call_soon(order.append, 4 * n + 2)
            loop.call_soon(order.append, 4 * n + 3)
        await asyncio.gather(*tasks)
        return order

    order = on_a_perturbed_loop(main)
    assert [n // 4 for n in order] == sorted(n // 4 for n in order)
    assert [n for n in order if n % 4 > 1] == [n for n in range(80) if n % 4 > 1]
    assert [n for n in order if n % 4 < 2] != [n for n in range(80) if n % 4 < 2]


def test_a_task_that_is_cancelled_by_a_callback_has_begun():
    async def main():
        begun, loop = [], asyncio.get_running_loop()

        async def begin(n):
            begun.append(n)
            await asyncio.Event().wait()

        tasks = [asyncio.create_task(begin(n)) for n in range(20)]
        for task in tasks:
            loop.call_soon(task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        return sorted(begun)

    assert on_a_perturbed_loop(main) == list(range(20))


def test_what_other_threads_schedule_meanwhile_is_not_lost():
    async def main():
        loop, heard, everything = asyncio.get_running_loop(), [], asyncio.Event()

        def hear(n):
            heard.append(n)
            if len(heard) == 3_000:
                everything.set()

        def shout():
            for n in range(3_000):
                loop.call_soon_threadsafe(hear, n)

        thread = threading.Thread(target=shout)
        thread.start()
        while not everything.is_set():
            await asyncio.gather(*(asyncio.sleep(0) for _ in range(50)))
        thread.join()
        return heard

    assert on_a_perturbed_loop(main) == list(range(3_000))


def test_delays_depend_only_on_the_seed_and_the_call():
    one, two, other = Perturbation("7"), Perturbation("7"), Perturbation("8")
    alone = [one.delays("SELECT 1") for _ in range(50)]
    mixed = [(two.delays("SELECT 2"), two.delays("SELECT 1"))[1] for _ in range(50)]
    assert alone == mixed
    assert alone != [other.delays("SELECT 1") for _ in range(50)]
    assert all(0.0 <= sum(delays) <= perturb.DELAY_SECONDS_MAX for delays in alone)
    assert max(map(sum, alone)) > 0.8 * perturb.DELAY_SECONDS_MAX


async def test_statements_and_both_ends_of_a_transaction_are_delayed(database_url, calls):
    async with Pool(DATABASE, database_url) as pool:
        await pool.rows("SELECT 1")
        async with pool.transaction() as session:
            await session.rows("SELECT 2")
    assert calls == ["Pool SELECT 1", "BEGIN", "Transaction SELECT 2", "COMMIT"]


def test_a_blocking_connection_is_delayed_in_its_own_thread(database_url, calls):
    async def both(database):
        await database.rows("SELECT 1")
        async with database.transaction() as session:
            await session.rows("SELECT 2")

    database = Blocking(DATABASE, database_url)
    complete(both(database))
    database.close()
    assert calls == ["Blocking SELECT 1", "BEGIN", "ConnectionSession SELECT 2", "COMMIT"]


async def test_the_object_store_is_delayed(tmp_path, calls):
    async def chunks():
        yield b"some"

    store = Local(tmp_path)
    await store.write("a/b", chunks())
    assert await store.read("a/b", 0, 4, None) == b"some"
    assert [found.key for page in [page async for page in store.pages("", None)] for found in page] == ["a/b"]
    await store.delete(["a/b"])
    assert calls == ["Local.write", "Local.read", "pages", "Local.delete"]


async def test_model_servers_and_webhooks_are_delayed(calls):
    async with running() as server:
        gateway = Gateway(GatewaySettings(url=server.url))
        await gateway.send(Request(url="/v1/models", body=b"{}", id="r1"))
        await gateway.close()
    assert calls == ["Gateway.send"]


def test_nothing_is_perturbed_after_the_block():
    before = (Pool.rows, Pool.transaction, Blocking.rows, Local.write, Gateway.send, asyncio.new_event_loop)
    with perturbed("7"), perturbed("8"):
        assert asyncio.new_event_loop is PerturbedLoop
    after = (Pool.rows, Pool.transaction, Blocking.rows, Local.write, Gateway.send, asyncio.new_event_loop)
    assert before == after


FAILING = """
import asyncio, pytest

async def test_order():
    assert type(asyncio.get_running_loop()).__name__ == "SelectorEventLoop"

@pytest.mark.timed("reason")
def test_timed():
    assert False
"""


@pytest.mark.thorough
def test_a_run_stops_at_the_first_failure_and_says_how_to_repeat_it_and_leaves_out_timed_tests(tmp_path):
    """In a process of its own, as `make test-perturbed` runs it."""
    (tmp_path / "test_some.py").write_text(FAILING)
    plugins = ["-n0", "-p", "tests.perturb", "-p", "no:cacheprovider", "--asyncio-mode=auto", "-o", "markers=timed: x"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.perturbed.run", "--seed", "7", *plugins, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert "1 failed, 1 deselected" in run.stdout
    assert "perturbed: failed with seed 7; repeat all of it with `make test-perturbed SEED=7`, or" in run.stdout
    command = f"{perturb.LONG}=1 {perturb.SEED}=7 pytest test_some.py::test_order"
    assert run.stdout.splitlines()[-1] == command


def test_tests_that_have_not_begun_when_the_time_is_over_are_skipped(monkeypatch, request):
    monkeypatch.setenv(perturb.UNTIL, "0")
    with pytest.raises(pytest.skip.Exception, match="the time is over"):
        perturb.pytest_runtest_setup(request.node)


def test_a_run_says_its_seed(monkeypatch):
    monkeypatch.setenv(perturb.SEED, "7")
    assert perturb.pytest_report_header() == f"perturbed: all tests, {perturb.SEED}=7"
