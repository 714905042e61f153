"""Rounds of upkeep run once per period over all workers, even if workers start, stop, fail or hang."""

import asyncio
import time

import pytest

from batchwright.db.database import Database
from batchwright.engine import upkeep as module
from batchwright.engine.upkeep import SQL, Round, Upkeep, lock_round
from batchwright.engine.worker.processes import Processes
from tests.support import BASIC, put_one, raw, take_one


class Tally:
    """A round that records which worker ran it."""

    def __init__(self, queue, every_seconds=10.0):
        self.queue, self.every_seconds, self.ran = queue, every_seconds, []

    def keeper(self, name, *, run=None, round="tally"):
        async def note(session):
            self.ran.append(name)
            return None if run is None else await run(session)

        return Upkeep(self.queue, Processes(None, 1), BASIC, [Round(round, self.every_seconds, note)], name=name)


@pytest.fixture
async def tally(queue, clock):
    await clock.advance(queue, 0)
    return Tally(queue)


async def test_a_new_database_needs_no_upkeep_yet_but_one_that_was_unused_for_a_day_does(tally, clock):
    await tally.keeper("first").run_due()
    assert tally.ran == []
    await clock.advance(tally.queue, 86_400)
    await tally.keeper("later").run_due()
    assert tally.ran == ["later"]


async def test_a_round_runs_once_per_period_however_many_workers_check_it(tally, clock):
    keepers = [tally.keeper(f"w{n}") for n in range(5)]
    for _ in range(40):
        await asyncio.gather(*(keeper.run_due() for keeper in keepers))
        await clock.advance(tally.queue, 1.0)
    assert len(tally.ran) in (3, 4), tally.ran


async def test_one_worker_runs_all_rounds_and_the_others_only_check(tally, clock):
    keepers = [tally.keeper(f"w{n}") for n in range(3)]
    for keeper in keepers * 2:
        await keeper.run_due()
    pauses = [keeper._pause for keeper in keepers]
    assert pauses[0] <= module._PAUSE_SECONDS_MAX
    assert min(pauses[1:]) >= 0.75 * module._WATCH_SECONDS
    await clock.advance(tally.queue, 10.1)
    for keeper in reversed(keepers):
        await keeper.run_due()
    assert tally.ran == ["w2"], "the round is so late that another worker takes over"
    for _ in range(3):
        await clock.advance(tally.queue, 10.1)
        for keeper in keepers:
            await keeper.run_due()
    assert len(tally.ran) == 4


async def test_a_checking_worker_waits_until_a_round_is_late_and_then_runs_all_rounds(tally, clock):
    keeper, other = tally.keeper("keeper"), tally.keeper("other")
    await keeper.run_due()
    await clock.advance(tally.queue, 10.0)
    await keeper.run_due()
    await clock.advance(tally.queue, 9.9)
    await keeper.run_due()
    await clock.advance(tally.queue, 0.4)
    await other.run_due()
    assert tally.ran == ["keeper"], "the round is due, but its usual worker still has time"
    await clock.advance(tally.queue, 1.2)
    await other.run_due()
    assert tally.ran == ["keeper", "other"]
    assert other._pause <= module._PAUSE_SECONDS_MAX
    await keeper.run_due()
    assert keeper._pause >= 0.75 * module._WATCH_SECONDS, "the first worker notices that another one runs the rounds"


async def test_a_round_that_only_one_worker_knows_is_run_by_that_worker(tally, clock):
    keeper, other = tally.keeper("keeper", round="one"), tally.keeper("other", round="two")
    for _ in range(3):
        await keeper.run_due()
        await other.run_due()
        await clock.advance(tally.queue, 11.5)
    assert tally.ran == ["keeper", "other"] * 2


async def test_a_round_that_fails_is_not_retried_by_every_worker_at_once(tally, clock, caplog):
    async def fail(session):
        raise ValueError("broken")

    keepers = [tally.keeper(f"w{n}", run=fail) for n in range(4)]
    for keeper in keepers:
        await keeper.run_due()
    await clock.advance(tally.queue, 20)
    for keeper in keepers * 2:
        await keeper.run_due()
    assert len(tally.ran) == 1
    assert "the upkeep failed (round 'tally')" in caplog.text
    await clock.advance(tally.queue, 20)
    for keeper in keepers:
        await keeper.run_due()
    assert len(tally.ran) == 2


async def test_a_round_that_has_more_work_runs_again_at_once(tally, clock):
    async def leave(session):
        return len(tally.ran) < 3

    keeper = tally.keeper("w", run=leave)
    await keeper.run_due()
    await clock.advance(tally.queue, 10)
    for _ in range(5):
        await keeper.run_due()
    assert len(tally.ran) == 3


async def test_a_round_that_another_worker_runs_is_skipped(tally, clock):
    keeper = tally.keeper("w")
    await keeper.run_due()
    await clock.advance(tally.queue, 10)
    async with lock_round(tally.queue.database, "tally") as session:
        assert session is not None
        await asyncio.wait_for(keeper.run_due(), 5)
    assert tally.ran == []
    await keeper.run_due()
    assert tally.ran == ["w"]


async def test_a_checking_worker_knows_when_an_outage_ended(tally, clock, monkeypatch):
    """When it takes over much later, rescues do not wait for another lease."""
    keeper, other = tally.keeper("keeper"), tally.keeper("other")
    await keeper.run_due()
    other.note_outage()
    await other.run_due()
    over_at = time.monotonic()
    assert other._no_rescue_until <= over_at + tally.queue.settings.lease_seconds
    monkeypatch.setattr(other, "_no_rescue_until", over_at)
    id = await put_one(tally.queue)
    await take_one(tally.queue)
    await clock.advance(tally.queue, 100)
    await other.run_due()
    assert (await tally.queue.get(id)).rescues == 1


AHEAD = """
UPDATE batchwright.upkeep SET due_at = due_at + interval '1 year', ran_at = ran_at + interval '1 year' RETURNING name
"""


async def test_a_clock_that_was_set_back_delays_no_round(tally, clock):
    keeper = tally.keeper("w")
    await keeper.run_due()
    await raw(tally.queue, AHEAD)
    await keeper.run_due()
    await clock.advance(tally.queue, 10)
    await keeper.run_due()
    assert len(tally.ran) >= 1


async def test_if_a_fleet_finds_everything_late_one_worker_takes_over_and_the_others_try_only_once(
    tally, clock, monkeypatch
):
    asked = []
    ask = Database.ask

    def count(self, sql, *args):
        asked.append(sql)
        return ask(self, sql, *args)

    gone = tally.keeper("gone")
    await gone.run_due()
    fleet = [tally.keeper(f"w{n}") for n in range(5)]
    for keeper in fleet:
        await keeper.run_due()
    await clock.advance(tally.queue, 3600.0)
    for keeper in fleet:
        await keeper.look()  # all of them see that everything is late
    monkeypatch.setattr(Database, "ask", count)
    for keeper in fleet:
        await keeper.run_due()
    assert tally.ran == ["w0"]
    rounds = len(fleet[0]._rounds)
    assert asked.count(SQL["lock_round"]) == rounds + len(fleet) - 1
