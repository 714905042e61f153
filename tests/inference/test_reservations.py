"""Single requests from a shared budget: never too many, none lost, and a request that must wait is told how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import psycopg
import pytest

from batchwright.db.database import Database, DatabaseSettings, Pool, connect_arguments
from batchwright.inference import budgets
from batchwright.inference.answers import RateHeaders, Reply, classify
from batchwright.inference.budgets import Budget, Rate, RateBudget, RateLimits, Reservation, Wait
from batchwright.inference.feedback import read_feedback
from batchwright.inference.settings import GatewaySettings
from tests.engine.planning import numbered
from tests.support import DATABASE, raw

WALL = 1_800_000_000.0


def answer(status=200, *, retry_after=None, seconds=0.0, **rates):
    headers = RateHeaders(**rates) if rates else None
    reply = Reply(status=status, body=b"{}", retry_after=retry_after, seconds=seconds, rates=headers)
    return classify(reply, now=WALL)


class Shop:
    """Budgets with the same name and a clock that stands still."""

    def __init__(self, queue, clock):
        self.queue, self.clock = queue, clock

    def budget(self, name="server", *, per_second=None, tokens_per_second=None, concurrency=None):
        limits = RateLimits(
            requests_per_minute=None if per_second is None else per_second * 60,
            tokens_per_minute=None if tokens_per_second is None else tokens_per_second * 60,
            concurrency=concurrency,
        )
        return RateBudget(self.queue.database, name, limits)

    async def advance(self, seconds):
        return await self.clock.advance(self.queue, seconds)


@pytest.fixture
async def shop(queue, clock):
    await clock.advance(queue, 0)
    return Shop(queue, clock)


async def granted(budget, tokens=1, **options):
    found = await budget.reserve(tokens, holder="w", **options)
    assert isinstance(found, Reservation), found
    return found


async def refused(budget, tokens=1, **options):
    found = await budget.reserve(tokens, holder="w", **options)
    assert isinstance(found, Wait), found
    return found


# How much may be sent ---------------------------------------------------------------------------------------------


async def test_many_connections_at_once_never_take_more_than_the_rate(shop, database_url):
    settings = DatabaseSettings(pool_size=8)
    async with Pool(settings, database_url) as pool:
        limits = RateLimits(requests_per_minute=600, concurrency=30)
        database = Database(pool, clock=shop.clock)
        counts: Counter[str] = Counter()
        held: list[Reservation] = []

        async def ask(holder):
            budget = RateBudget(database, "crowd", limits)
            for _ in range(50):
                found = await budget.reserve(5, holder=holder)
                counts[type(found).__name__] += 1
                if isinstance(found, Reservation):
                    held.append(found)

        await asyncio.gather(*(ask(f"w{n}") for n in range(8)))
        assert counts == {"Reservation": 10, "Wait": 390}, "a second's worth, while the clock stands still"
        await shop.advance(1)
        await asyncio.gather(*(ask(f"w{n}") for n in range(8)))
        assert counts["Reservation"] == 20
        for _ in range(2):
            await shop.advance(1)
            await asyncio.gather(*(ask(f"w{n}") for n in range(2)))
        assert counts["Reservation"] == 30, "there are no more slots"
        assert len({one.id for one in held}) == 30
        ((in_use, slots),) = await raw(
            shop.queue, "SELECT in_use, (SELECT count(*) FROM batchwright.budget_slot) FROM batchwright.budget"
        )
        assert (in_use, slots) == (30, 30)
        budget = RateBudget(database, "crowd", limits)
        await asyncio.gather(*(budget.settle(one, 5) for one in held))
        ((in_use, slots),) = await raw(
            shop.queue, "SELECT in_use, (SELECT count(*) FROM batchwright.budget_slot) FROM batchwright.budget"
        )
        assert (in_use, slots) == (0, 0)


async def test_a_short_wait_is_granted_and_the_next_request_waits_longer(shop):
    budget = shop.budget(per_second=2)
    waits = [(await granted(budget, max_wait_seconds=60)).wait_seconds for _ in range(6)]
    assert waits == pytest.approx([0, 0, 0.5, 1.0, 1.5, 2.0])
    await shop.advance(2)
    assert (await granted(budget, max_wait_seconds=60)).wait_seconds == pytest.approx(0.5)


async def test_a_refused_reservation_takes_nothing(shop):
    budget = shop.budget(per_second=1, tokens_per_second=100, concurrency=1)
    await budget.settle(await granted(budget, 10), 10)
    before = await budget.describe()
    wait = await refused(budget, 80)
    assert (wait.reason, wait.seconds) == ("requests", pytest.approx(1.0))
    after = await budget.describe()
    assert (after.requests, after.tokens, after.in_use) == (before.requests, before.tokens, 0)
    await shop.advance(wait.seconds)
    await granted(budget, 80)


async def test_a_request_that_waited_as_told_may_be_sent(shop):
    budget = shop.budget(per_second=0.05)
    await granted(budget)
    for _ in range(5):
        await shop.advance((await refused(budget)).seconds)
        await granted(budget)


async def test_refused_requests_get_different_times_one_after_the_other(shop):
    budget = shop.budget(per_second=2)
    for _ in range(2):
        await granted(budget)
    told = [(await refused(budget)).seconds for _ in range(5)]
    assert told == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    await shop.advance(0.5)
    await granted(budget)


async def test_a_refused_request_need_not_wait_long_because_of_others(shop):
    budget = shop.budget(per_second=0.1)
    await granted(budget)
    told = [(await refused(budget)).seconds for _ in range(40)]
    assert told[:3] == pytest.approx([10, 20, 30])
    assert max(told) <= budgets.LINE_SECONDS_MAX


async def test_more_tokens_than_a_second_brings_pass_and_leave_a_debt(shop):
    budget = shop.budget(tokens_per_second=100)
    await granted(budget, 500)
    wait = await refused(budget, 1)
    assert (wait.reason, wait.seconds) == ("tokens", pytest.approx(4.0))
    await shop.advance(3.9)
    await refused(budget, 1)
    await shop.advance(0.2)
    await granted(budget, 1)


async def test_an_estimate_is_corrected_upwards_and_downwards(shop):
    budget = shop.budget(tokens_per_second=100)
    await budget.settle(await granted(budget, 90), 400)
    assert (await budget.describe()).tokens == pytest.approx(-300)
    assert (await refused(budget)).seconds == pytest.approx(3.0)
    await shop.advance(4)
    reserved = await granted(budget, 1000)
    await budget.settle(reserved, 10)
    assert (await budget.describe()).tokens == pytest.approx(90)
    await budget.settle(reserved, 10)
    assert (await budget.describe()).tokens == pytest.approx(90), "a reservation is settled once"


async def test_without_a_count_the_estimate_stays(shop):
    budget = shop.budget(tokens_per_second=100)
    await budget.settle(await granted(budget, 60), None)
    assert (await budget.describe()).tokens == pytest.approx(40)


async def test_a_cancelled_reservation_gives_everything_back_and_no_more(shop):
    budget = shop.budget(per_second=1, tokens_per_second=100, concurrency=1)
    for _ in range(3):
        reserved = await granted(budget, 70)
        await budget.cancel(reserved)
        await budget.cancel(reserved)
        await budget.settle(reserved, 70)
    state = await budget.describe()
    assert (state.requests, state.tokens, state.in_use) == (1, 100, 0)


async def test_more_requests_than_were_reserved_are_a_debt(shop):
    budget = shop.budget(per_second=1)
    await budget.settle(await granted(budget), None, requests=5)
    assert (await refused(budget)).seconds == pytest.approx(5.0)


# How many at a time -----------------------------------------------------------------------------------------------


async def test_calls_in_flight_are_counted_over_all_workers(shop):
    one, other = (shop.budget(concurrency=2) for _ in range(2))
    first = await granted(one)
    await granted(other)
    assert (await refused(one, max_wait_seconds=60)).reason == "concurrency"
    assert str(await one.describe()) == "the maximum of 2 calls is in flight"
    await one.settle(first, None)
    await granted(other)
    await refused(one)


async def test_slots_of_a_worker_that_died_come_back_and_only_once(shop):
    budget = shop.budget(concurrency=2)
    late = await granted(budget, lease_seconds=10)
    await granted(budget, lease_seconds=100)
    await shop.advance(9)
    await refused(budget)
    await shop.advance(2)
    await granted(budget)
    await refused(budget)
    await budget.settle(late, None)  # its worker was only slow, not dead
    assert (await budget.describe()).in_use == 2
    await refused(budget)


async def test_slots_add_up_when_they_are_given_back_just_as_they_end(shop, database_url):
    """Sessions that settle and sessions that free expired slots change the same rows; the clock is the server's."""
    async with Pool(DatabaseSettings(pool_size=8), database_url) as pool:
        budget = RateBudget(Database(pool), "race", RateLimits(concurrency=12))
        most = 0

        async def use(n):
            nonlocal most
            for turn in range(30):
                found = await budget.reserve(1, holder="w", lease_seconds=0.003 * (n % 4))
                if isinstance(found, Reservation) and turn % 3:
                    await (budget.settle(found, 1) if turn % 2 else budget.cancel(found))
                if n == 0:
                    ((in_use,),) = await pool.rows("SELECT in_use FROM batchwright.budget WHERE name = 'race'")
                    most = max(most, in_use)

        await asyncio.gather(*(use(n) for n in range(16)))
        in_use, slots = (
            await pool.rows("SELECT in_use, (SELECT count(*) FROM batchwright.budget_slot) FROM batchwright.budget")
        )[0]
        assert in_use == slots
        assert 0 < most <= 12


async def test_slots_that_expire_together_are_freed_once_for_many_callers(shop, database_url):
    async with Pool(DatabaseSettings(pool_size=8), database_url) as pool:
        budget = RateBudget(Database(pool, clock=shop.clock), "crowd", RateLimits(concurrency=20))
        for _ in range(20):
            await granted(budget, lease_seconds=5)
        await shop.advance(6)
        found = await asyncio.gather(*(budget.reserve(1, holder="w") for _ in range(60)))
        assert Counter(type(one).__name__ for one in found) == {"Reservation": 20, "Wait": 40}


async def test_a_slot_is_held_for_the_wait_too(shop):
    budget = shop.budget(per_second=0.1, concurrency=2)
    await granted(budget, lease_seconds=5)
    await granted(budget, lease_seconds=5, max_wait_seconds=60)
    await shop.advance(12)
    assert (await budget.describe()).in_use == 1


async def test_the_time_to_wait_for_a_slot_follows_from_how_long_they_are_held(shop):
    budget = shop.budget(concurrency=2)
    for _ in range(2):
        reserved = await granted(budget)
        await shop.advance(8)
        await budget.settle(reserved, None)
    for _ in range(2):
        await granted(budget)
    told = [(await refused(budget)).seconds for _ in range(3)]
    assert [round(later - before, 3) for before, later in pairwise(told)] == [4, 4]


# Rate limits that servers report ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_date", [False, True])
async def test_a_refusal_stops_all_requests_until_the_servers_retry_after(shop, as_date):
    one, other = (shop.budget(per_second=10) for _ in range(2))
    text = format_datetime(datetime.fromtimestamp(WALL, UTC) + timedelta(seconds=30), usegmt=True) if as_date else "30"
    await one.settle(await granted(one), None, answer(429, retry_after=text))
    wait = await refused(other, max_wait_seconds=20)
    assert (wait.reason, wait.seconds) == ("blocked", pytest.approx(30))
    state = await other.describe()
    assert state.blocked_until == shop.clock.time + timedelta(seconds=30)
    assert f"nothing is sent until {state.blocked_until:%H:%M:%S} UTC" in str(state)
    assert (await granted(other, max_wait_seconds=30)).wait_seconds == pytest.approx(30)
    await shop.advance(30)
    await granted(other)


async def test_a_refusal_stops_all_requests_even_without_a_configured_rate(shop):
    one, other = (shop.budget() for _ in range(2))
    reserved = await granted(one, 10**6)
    await granted(other, 10**6)
    await one.settle(reserved, None, answer(429, retry_after="7"))
    assert (await refused(other)).seconds == pytest.approx(7)
    await shop.advance(7)
    await one.settle(await granted(other), None, answer(429))
    assert 1 < (await refused(other)).seconds < 3, "without Retry-After, requests may resume soon"


async def test_a_refusal_cuts_the_rate_and_time_brings_it_back(shop):
    budget = shop.budget(per_second=100)
    await budget.settle(await granted(budget), None, answer(429))
    assert (await budget.describe()).share == pytest.approx(0.7)
    await shop.advance(60)
    assert (await budget.describe()).share == pytest.approx(0.75)
    for _ in range(100):
        await granted(budget)
    await shop.advance(0.1)
    assert (await budget.describe()).requests == pytest.approx(7.5, abs=0.01)
    await shop.advance(299.9)
    assert (await budget.describe()).share == pytest.approx(1.0)


async def test_refusals_of_what_was_sent_before_a_cut_do_not_cut_again(shop):
    budget = shop.budget(per_second=100)
    reserved = [await granted(budget) for _ in range(8)]
    for one in reserved:
        await shop.advance(0.1)
        await budget.settle(one, None, answer(429, seconds=5.0))
    assert (await budget.describe()).share == pytest.approx(0.7, abs=0.01)
    await shop.advance(3)
    for _ in range(20):
        await shop.advance(30)
        await budget.settle(await granted(budget), None, answer(429, seconds=1.0))
    assert (await budget.describe()).share >= budgets.SHARE_MIN


async def test_a_limit_that_is_shared_with_other_clients_is_respected(shop):
    budget = shop.budget(per_second=10, tokens_per_second=1000)
    heard = answer(requests_remaining="2", tokens_remaining="300")
    await budget.settle(await granted(budget, 10), 10, heard)
    state = await budget.describe()
    assert (state.requests, state.tokens) == (2, 300)
    await budget.settle(await granted(budget, 10), 10, answer(requests_remaining="9999", tokens_remaining="999999"))
    state = await budget.describe()
    assert (state.requests, state.tokens) == (1, 290), "a report of the server never raises the level"


async def test_when_a_server_has_nothing_left_requests_wait_until_it_has_more(shop):
    budget = shop.budget(per_second=10, tokens_per_second=1000)
    nothing = {"requests_limit": "600", "requests_remaining": "0", "requests_reset": "6m0s"}
    await budget.settle(await granted(budget), 1, answer(**nothing))
    wait = await refused(budget)
    assert (wait.reason, wait.seconds) == ("requests", pytest.approx(0.6)), "a 600th of six minutes"
    free = shop.budget("free")
    await free.settle(await granted(free), 1, answer(requests_remaining="0", requests_reset="20s"))
    assert (await refused(free)).seconds == pytest.approx(20)


async def test_a_lower_limit_of_the_server_replaces_the_configured_one(shop):
    budget = shop.budget(per_second=10)
    await budget.settle(await granted(budget), 1, answer(requests_limit="60", requests_remaining="59"))
    for _ in range(9):
        await granted(budget)
    assert (await refused(budget)).seconds == pytest.approx(1.0)
    await shop.advance(60)
    await budget.settle(await granted(budget), 1, answer(requests_limit="6000", requests_remaining="5999"))
    for _ in range(9):
        await granted(budget)
    assert (await refused(budget)).seconds == pytest.approx(0.1), "a higher limit of the server is ignored"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6m0s", 360 / 2), ("20ms", 0.01), ("1.5", 0.75), ("1h", 300), ("soon", None), ("-1", None), (None, None)],
)
def test_times_are_read_as_servers_write_them(text, seconds):
    found = read_feedback(answer(requests_limit="2", requests_remaining="0", requests_reset=text))
    assert found.requests.seconds == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["many", "-5", "1e999", "٣", "", "inf"])
def test_invalid_numbers_are_ignored(text):
    found = read_feedback(answer(tokens_limit=text, tokens_remaining=text))
    assert (found.tokens.count, found.tokens.limit_per_second) == (None, None)


async def test_an_answer_without_news_costs_no_round_trip(shop, monkeypatch):
    budget = shop.budget(per_second=10)
    asked = count_statements(shop, monkeypatch)
    for _ in range(3):
        plenty = answer(requests_limit="6000", requests_remaining="5000", tokens_remaining="100000")
        await budget.settle(await granted(budget, 5), 5, plenty)
    assert asked == {"reserve": 4, "open": 1}


async def test_a_reservation_and_its_end_are_one_round_trip_each(shop, monkeypatch):
    budget = shop.budget(per_second=100, tokens_per_second=1000, concurrency=5)
    await budget.cancel(await granted(budget, 5))
    asked = count_statements(shop, monkeypatch)
    for _ in range(10):
        await budget.settle(await granted(budget, 5), 7)
    assert asked == {"reserve": 10, "settle": 10}


def count_statements(shop, monkeypatch):
    """The statements that go to the server, by their names."""
    names = {sql: name for name, sql in budgets.SQL.items()}
    asked: Counter[str] = Counter()
    source = shop.queue.database._source
    rows = source.rows

    async def counted(sql, params=None):
        asked[names[sql]] += 1
        return await rows(sql, params)

    monkeypatch.setattr(source, "rows", counted)
    return asked


# Together with the dispatcher of batches ---------------------------------------------------------------------------


async def test_the_dispatcher_and_others_see_what_each_took(shop):
    budget = shop.budget(per_second=10, tokens_per_second=1000)

    async def pause(_):
        pauses.append(1)
        await shop.advance(0.25)

    pauses = []
    dispatcher = Budget(shop.queue.database, "server", Rate(requests=10.0, tokens=1000.0), pause)
    assert await dispatcher.take(100)
    assert (await refused(budget)).reason == "requests", "it has taken the share of one second"
    await shop.advance(1)
    await granted(budget, 3000)
    for _ in range(9):
        assert await dispatcher.take(100)
    assert not pauses, "it may still send those"
    assert await dispatcher.take(100)
    assert len(pauses) >= 8, "it waits until 2000 tokens of others are paid"


async def test_a_gateway_has_the_budget_of_its_batches(shop):
    settings = GatewaySettings(url="http://h:1/v1", requests_per_minute=100, tokens_per_minute=7_000)
    budget = RateBudget.of(shop.queue.database, settings, concurrency=3)
    await Budget(shop.queue.database, settings.endpoint, Rate.of(settings)).take(1)
    assert (await refused(budget)).reason == "requests"


async def test_a_refusal_of_the_dispatcher_stops_others_and_the_other_way_round(shop):
    budget = shop.budget(per_second=10)

    async def pause(_):
        nonlocal waited
        waited += 1
        await shop.advance(1)

    waited = 0.0
    dispatcher = Budget(shop.queue.database, "server", Rate(requests=10.0, tokens=1e12), pause)
    await budget.settle(await granted(budget), None, answer(429, retry_after="5"))
    assert await dispatcher.take(1)
    assert waited == 5
    dispatcher.settle(1, None, answer(429, retry_after="9"))
    assert await dispatcher.take(1)
    assert waited == 14, "it must not spend what it had taken before"
    dispatcher.settle(1, None, answer(429, retry_after="20"))
    await dispatcher._telling
    assert (await refused(budget)).seconds == pytest.approx(20)


async def test_neither_the_dispatcher_nor_waiting_reservations_starve(shop):
    budget = shop.budget(per_second=1)
    taken: Counter[str] = Counter()
    due = shop.clock.time

    async def pause(seconds):
        nonlocal due
        for _ in range(4):
            await shop.advance(seconds / 4)
            if shop.clock.time >= due:
                found = await budget.reserve(1, holder="w")
                taken["other"] += isinstance(found, Reservation)
                due = shop.clock.time + timedelta(seconds=getattr(found, "seconds", 0.0))

    dispatcher = Budget(shop.queue.database, "server", Rate(requests=1.0, tokens=1e12), pause)
    began = shop.clock.time
    for _ in range(20):
        taken["dispatcher"] += await dispatcher.take(1)
    took = (shop.clock.time - began).total_seconds()
    assert taken["other"] >= 5
    assert took - 4 <= taken.total() <= took + 1.1
    assert took < 120, "the dispatcher must get at least a sixth"


async def test_the_dispatcher_queues_if_reservations_never_let_the_level_rise(shop):
    budget = shop.budget(per_second=10)
    taken: Counter[str] = Counter()

    async def pause(seconds):
        await shop.advance(seconds)
        while isinstance(await budget.reserve(1, holder="w", max_wait_seconds=3), Reservation):
            taken["other"] += 1

    await pause(0)
    dispatcher = Budget(shop.queue.database, "server", Rate(requests=10.0, tokens=1e12), pause)
    began = shop.clock.time
    for _ in range(30):
        taken["dispatcher"] += await dispatcher.take(1)
    took = (shop.clock.time - began).total_seconds()
    assert took < 30
    assert taken.total() <= 10 * (took + 3 + 1) + 1


# The statements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", budgets.SQL)
def test_every_statement_can_be_prepared(database_url, name):
    with psycopg.connect(database_url, autocommit=True, **connect_arguments(DATABASE)) as connection:
        text, _ = numbered(name, budgets.SQL)
        connection.execute(f"PREPARE probe AS {text}".encode())


async def test_an_unused_budget_is_full(shop):
    state = await shop.budget(per_second=1, concurrency=3).describe()
    assert (state.reason, state.wait_seconds, state.in_use, str(state)) == (None, 0.0, 0, "open")


async def test_a_clock_that_was_set_back_delays_requests_only_shortly(shop):
    budget = shop.budget(per_second=1)
    await shop.advance(3600)
    await budget.settle(await granted(budget), None, answer(429, retry_after="60"))
    await refused(budget)
    await shop.advance(-3600)
    for _ in range(3):
        if isinstance(found := await budget.reserve(1, holder="w"), Reservation):
            break
        assert found.seconds <= 2
        await shop.advance(found.seconds)
    else:
        pytest.fail("it still waits")
