"""Slots, the adaptive limit and the breaker."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from batchwright.inference.adaptive import AdaptiveLimit, Phase, Sent
from batchwright.inference.answers import Failure, Reply, classify
from batchwright.inference.limits import CircuitBreaker, Limits, Permit, Slots
from batchwright.inference.settings import InferenceSettings


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def taking(slots, weight=1):
    await slots.take(weight)
    try:
        yield
    finally:
        slots.give(weight)


@asynccontextmanager
async def permitted(limits, model, request_bytes):
    """Take slots like a sender: that of the model first, then the others."""
    permit = Permit(limits, model)
    if not permit.take_slot_now():
        await permit.take_slot()
    try:
        if not permit.take_rest_now(request_bytes):
            await permit.take_rest(request_bytes)
        yield
    finally:
        permit.give_back()


class Holder:
    """A task that holds a slot until it is released."""

    def __init__(self, slot, log=None, name=None):
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._hold(slot, log, name))

    async def _hold(self, slot, log, name):
        async with slot:
            self.inside.set()
            if log is not None:
                log.append(name)
            await self.leave.wait()

    async def end(self):
        self.leave.set()
        await self.task


async def test_slots_are_given_in_order_of_arrival():
    slots, log = Slots("m", 1), []
    holders = [Holder(taking(slots), log, n) for n in range(4)]
    for n, holder in enumerate(holders):
        await settle()
        assert log == list(range(n + 1))
        assert (slots.in_use, len(slots._waiting)) == (1, 3 - n)
        await holder.end()
    assert (slots.in_use, slots.broken) == (0, None)


async def test_a_new_request_does_not_overtake_waiting_ones():
    slots, log = Slots("bytes", 10), []
    small = Holder(taking(slots, 6), log, "small")
    large = Holder(taking(slots, 6), log, "large")
    tiny = Holder(taking(slots, 1), log, "tiny")
    await settle()
    assert log == ["small"]
    await small.end()
    await settle()
    assert log == ["small", "large", "tiny"]
    await large.end()
    await tiny.end()


async def test_a_request_larger_than_the_capacity_runs_alone():
    slots = Slots("bytes", 10)
    one, huge = Holder(taking(slots, 1)), Holder(taking(slots, 50))
    await settle()
    assert not huge.inside.is_set()
    await one.end()
    await settle()
    assert huge.inside.is_set()
    await huge.end()
    assert slots.in_use == 0


async def test_capacity_grows_at_once_and_shrinks_as_slots_are_released():
    slots = Slots("m", 1)
    holders = [Holder(taking(slots)) for _ in range(3)]
    await settle()
    slots.capacity = 3
    await settle()
    assert slots.in_use == 3
    slots.capacity = 1
    late = Holder(taking(slots))
    await holders[0].end()
    await holders[1].end()
    await settle()
    assert not late.inside.is_set()
    await holders[2].end()
    await late.end()


async def test_cancelling_at_any_moment_loses_no_slot():
    random.seed(3)
    slots = Slots("m", 3)
    for _ in range(300):
        holders = [Holder(taking(slots, random.choice([1, 1, 2]))) for _ in range(8)]
        for holder in random.sample(holders, 8):
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            # Releasing a slot and cancelling in the same tick hits a waiter that was just admitted.
            holder.leave.set()
            random.choice(holders).task.cancel()
        await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)
        assert (slots.in_use, len(slots._waiting), slots.broken) == (0, 0, None)


async def test_a_waiter_that_is_admitted_and_cancelled_at_once_passes_its_slot_on():
    slots = Slots("m", 1)
    first, second, third = (Holder(taking(slots)) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)
    second.task.cancel()
    await settle()
    assert third.inside.is_set()
    assert slots.in_use == 1
    await third.end()
    await asyncio.gather(second.task, return_exceptions=True)


async def test_a_waiter_that_is_cancelled_just_before_a_slot_is_free_takes_no_slot():
    slots = Slots("m", 1)
    first, second, third = (Holder(taking(slots)) for _ in range(3))
    await settle()
    second.task.cancel()
    slots.capacity = 2
    with pytest.raises(asyncio.CancelledError):
        await second.task
    assert (third.inside.is_set(), slots.in_use) == (True, 2)
    await first.end()
    await third.end()


async def test_a_slot_given_back_twice_is_reported_and_not_counted(caplog):
    limits = Limits(settings())
    model = limits.of_model("http://a", "llama", now=0.0)
    slots, permit = model.slots, Permit(limits, model)
    async with permitted(limits, model, 10):
        assert permit.take_slot_now()
        assert permit.take_rest_now(10)
        permit.give_back()
        assert slots.broken is None
        permit.give_back()
        assert (slots.in_use, limits.total.in_use, limits.bytes.in_use) == (1, 1, 10)
    assert slots.broken == "the slots of llama at http://a do not add up: one slot was given back twice"
    assert slots.broken in caplog.text


def settings(**options):
    return InferenceSettings(**options)


async def test_a_request_holds_the_model_first_then_all_models_then_bytes():
    limits = Limits(settings(concurrency=10, bytes_in_flight_max=2048, response_bytes_max=1024))
    model = limits.of_model("http://a", "m", now=0.0)
    assert limits.of_model("http://a", "m", now=9.0) is model
    model.answer_bytes = 500
    async with permitted(limits, model, 100):
        assert (model.slots.in_use, limits.total.in_use, limits.bytes.in_use) == (1, 1, 600)
        assert model.sent(3.0) == Sent(3.0, 1)
    assert (model.slots.in_use, limits.total.in_use, limits.bytes.in_use) == (0, 0, 0)
    assert limits.broken is None


@pytest.mark.parametrize("scarce", ["total", "bytes"])
async def test_without_waiting_a_request_takes_all_that_it_needs_or_nothing(scarce):
    limits = Limits(settings(concurrency=10, bytes_in_flight_max=2048, response_bytes_max=1024))
    model = limits.of_model("http://a", "m", now=0.0)
    first, second = Permit(limits, model), Permit(limits, model)
    assert first.take_slot_now()
    assert first.take_rest_now(1500)
    getattr(limits, scarce).capacity = 1
    assert second.take_slot_now()
    assert not second.take_rest_now(100)
    assert (limits.total.in_use, limits.bytes.in_use) == (1, 1500)
    first.give_back()
    await second.take_rest(100)
    assert (limits.total.in_use, limits.bytes.in_use) == (1, 100)
    second.give_back()
    assert (limits.total.in_use, limits.bytes.in_use, model.slots.in_use) == (0, 0, 0)
    assert limits.broken is None


async def test_a_throttled_model_does_not_hold_slots_of_others():
    limits = Limits(settings(concurrency=10, model_concurrency_start=2))
    slow, quick = (limits.of_model("http://a", model, now=0.0) for model in ("slow", "quick"))
    crowd = [Holder(permitted(limits, slow, 1)) for _ in range(20)]
    await settle()
    assert limits.total.in_use == 2
    async with permitted(limits, quick, 1):
        assert limits.total.in_use == 3
    for holder in crowd:
        holder.leave.set()
    await asyncio.gather(*(holder.task for holder in crowd))
    assert limits.total.in_use == limits.bytes.in_use == slow.slots.in_use == 0


async def test_cancelled_while_waiting_for_the_second_slot_gives_back_the_first():
    limits = Limits(settings(concurrency=10))
    model = limits.of_model("http://a", "m", now=0.0)
    limits.total.capacity = 1
    first, second = Holder(permitted(limits, model, 1)), Holder(permitted(limits, model, 1))
    await settle()
    assert model.slots.in_use == 2
    second.task.cancel()
    await settle()
    assert model.slots.in_use == 1
    await first.end()
    await asyncio.gather(second.task, return_exceptions=True)
    assert limits.broken is None


async def test_a_broken_invariant_of_any_limit_is_reported_by_the_limits():
    limits = Limits(settings())
    model = limits.of_model("http://a", "m", now=0.0)
    Permit(limits, model).give_back()
    assert "m at http://a" in limits.broken


def answer(status=200, failure=None, body=b'{"choices": [1]}'):
    return classify(Reply(status=status, body=body, failure=failure), now=0.0)


def test_answers_move_the_limit_and_connection_failures_only_the_breaker():
    limits = Limits(settings())
    model, twin = limits.of_model("http://a", "m", now=0.0), limits.of_model("http://a", "n", now=0.0)
    model.heard(Sent(0.0, 10), answer(), 1.0)
    assert model.slots.capacity == 11
    assert model.answer_bytes == 16
    model.heard(Sent(1.0, 10), answer(429), 2.0)
    assert model.slots.capacity == 5
    for _ in range(5):
        model.heard(Sent(3.0, 5), answer(None, Failure.CONNECT), 3.0)
    assert model.slots.capacity == 5
    assert twin.breaker is model.breaker
    assert twin.wait_seconds(3.1) > 0
    assert limits.of_model("http://b", "m", now=3.0).wait_seconds(3.1) == 0


@pytest.mark.parametrize("status", [400, 404, 500, 502])
def test_other_failures_do_not_change_the_limit(status):
    model = Limits(settings()).of_model("http://a", "m", now=0.0)
    model.heard(Sent(0.0, 10), answer(status), 1.0)
    assert model.adaptive.limit == 10


# The adaptive limit


def limit(**options):
    return AdaptiveLimit(**{"start": 10, "least": 1, "most": 100, "now": 0.0, **options})


def test_it_doubles_in_a_round_trip_while_it_is_full():
    one = limit()
    for _ in range(10):
        one.answered(Sent(0.0, 10), 1.0)
    assert one.limit == 20


def test_it_does_not_grow_while_there_is_little_to_do():
    one = limit()
    for n in range(1000):
        one.answered(Sent(n * 1.0, 3), n + 1.0)
    assert one.limit == 10


def test_it_halves_once_per_round_trip():
    one = limit(start=64)
    for _ in range(20):
        one.overloaded(Sent(1.0, 64), 2.0)
    assert (one.limit, one.phase) == (32, Phase.RECOVERING)
    one.overloaded(Sent(2.5, 32), 3.0)
    assert one.limit == 16


def test_it_stays_within_its_bounds():
    one = limit(start=2, least=2, most=20)
    for n in range(50):
        one.overloaded(Sent(n + 0.5, 2), n + 1.0)
        assert one.limit == 2
    one = limit(most=20)
    for n in range(100):
        one.answered(Sent(n * 0.1, 20), n * 0.1 + 1)
        assert one.limit <= 20


def test_refusals_without_any_answer_between_them_cause_a_pause():
    one = limit()
    pauses = []
    now = 0.0
    for _ in range(9):
        one.overloaded(Sent(now + 0.01, 1), now + 0.02)
        now += 0.02
        pauses.append(round(one.wait_seconds(now), 3))
        now += pauses[-1]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    one.answered(Sent(now, 1), now + 1)
    one.overloaded(Sent(now + 2, 1), now + 3)
    assert one.wait_seconds(now + 3) == 0.0


# The breaker


def breaker():
    return CircuitBreaker(jitter=lambda: 1.0)


def test_the_breaker_opens_after_five_failures_in_a_row():
    one = breaker()
    for _ in range(4):
        one.failed(0.0)
    assert one.wait_seconds(0.0) == 0.0
    one.connected()
    for _ in range(5):
        one.failed(0.0)
    assert one.is_open
    assert one.wait_seconds(0.4) == pytest.approx(0.6)


def test_an_open_breaker_admits_one_probe_and_closes_when_it_connects():
    one = breaker()
    for _ in range(5):
        one.failed(0.0)
    assert one.wait_seconds(1.0) == 0.0
    assert one.wait_seconds(1.0) == 1.0
    one.connected()
    assert one.wait_seconds(1.0) == 0.0
    assert not one.is_open


def test_each_failed_probe_doubles_the_pause_up_to_the_longest():
    one, now, pauses = breaker(), 0.0, []
    for _ in range(5):
        one.failed(now)
    for _ in range(8):
        began = now
        while one.wait_seconds(now) > 0:
            now += 0.25
        pauses.append(now - began)
        one.failed(now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_requests_that_fail_at_the_same_time_do_not_prolong_the_pause():
    one = breaker()
    for _ in range(100):
        one.failed(0.0)
    assert one.wait_seconds(1.0) == 0.0


def test_a_probe_that_never_reports_is_replaced():
    one = breaker()
    for _ in range(5):
        one.failed(0.0)
    assert one.wait_seconds(1.0) == 0.0
    assert one.wait_seconds(15.9) > 0.0
    assert one.wait_seconds(16.0) == 0.0


def test_a_probe_that_has_not_failed_in_time_closes_the_breaker_until_the_next_failure():
    one = breaker()
    for _ in range(5):
        one.failed(0.0)
    assert one.wait_seconds(1.0) == 0.0
    assert [one.wait_seconds(16.0) for _ in range(3)] == [0.0] * 3
    one.failed(17.0)
    assert one.is_open
    assert one.wait_seconds(17.0) == 1.0


def test_a_probe_has_the_time_that_connecting_may_take():
    one = CircuitBreaker(jitter=lambda: 1.0, connect_timeout=60.0)
    for _ in range(5):
        one.failed(0.0)
    assert one.wait_seconds(1.0) == 0.0
    assert one.wait_seconds(60.0) > 0.0


def test_another_thread_can_check_whether_anything_is_broken_while_a_model_is_added():
    """The lease thread reports that with its heartbeat."""
    limits = Limits(InferenceSettings())

    class Growing:
        @property
        def slots(self):
            limits.of_model("http://one", "new", now=0.0)
            return limits.total

    limits._models["http://one", "first"] = Growing()
    assert limits.broken is None


# Bytes ----------------------------------------------------------------------------------------------------------


def small_limits():
    return Limits(settings(concurrency=10, bytes_in_flight_max=10_000, response_bytes_max=1024))


async def test_a_model_with_large_requests_that_wait_for_bytes_does_not_delay_one_with_small_requests():
    limits = small_limits()
    heavy, light = limits.of_model("http://a", "heavy", now=0.0), limits.of_model("http://a", "light", now=0.0)
    first, second = Holder(permitted(limits, heavy, 8000)), Holder(permitted(limits, heavy, 8000))
    await settle()
    assert (first.inside.is_set(), second.inside.is_set()) == (True, False)
    passed = 0
    one = Permit(limits, light)
    while one.take_slot_now() and one.take_rest_now(100):
        one.give_back()
        passed += 1
        assert passed < 1000, "the model with large requests is never served"
    one.give_back()
    assert 70 <= passed <= 81, "the other model may get only as many bytes as the waiting one needs"
    last = Holder(permitted(limits, light, 100))
    await settle()
    assert not last.inside.is_set()
    await first.end()
    await settle()
    assert second.inside.is_set()
    assert last.inside.is_set()
    await second.end()
    await last.end()
    assert (limits.bytes.in_use, len(limits.bytes._waiting), limits.broken) == (0, 0, None)


async def test_models_that_wait_for_bytes_are_served_in_proportion_to_their_weight():
    limits, log = small_limits(), []
    models = [limits.of_model("http://a", name, now=0.0) for name in ("heavy", "light")]
    all_of_it = Holder(taking(limits.bytes, 10_000))
    await settle()
    holders = [Holder(permitted(limits, models[0], 6000), log, f"heavy {n}") for n in range(2)]
    await settle()
    holders += [Holder(permitted(limits, models[1], 2500), log, f"light {n}") for n in range(4)]
    await settle()
    for holder in [all_of_it, *holders]:
        holder.leave.set()
        await settle()
    await asyncio.gather(*(holder.task for holder in [all_of_it, *holders]))
    assert log == ["light 0", "light 1", "heavy 0", "light 2", "light 3", "heavy 1"]
    assert (limits.bytes.in_use, limits.broken) == (0, None)


async def test_a_cancelled_wait_for_bytes_does_not_block_the_others():
    limits = small_limits()
    heavy, light = limits.of_model("http://a", "heavy", now=0.0), limits.of_model("http://a", "light", now=0.0)
    first, second = Holder(permitted(limits, heavy, 9500)), Holder(permitted(limits, heavy, 9500))
    third = Holder(permitted(limits, light, 9600))
    await settle()
    second.task.cancel()
    await settle()
    assert len(limits.bytes._waiting) == 1
    await first.end()
    await settle()
    assert third.inside.is_set()
    await third.end()
    assert (limits.bytes.in_use, len(limits.bytes._waiting), limits.broken) == (0, 0, None)


async def test_bytes_that_a_model_did_not_get_do_not_count_for_its_share():
    limits, log = small_limits(), []
    heavy, light = limits.of_model("http://a", "heavy", now=0.0), limits.of_model("http://a", "light", now=0.0)
    all_of_it = Holder(taking(limits.bytes, 10_000))
    await settle()
    for _ in range(5):
        impatient = Holder(permitted(limits, heavy, 6000))
        await settle()
        impatient.task.cancel()
        await settle()
    holders = [Holder(permitted(limits, heavy, 6000), log, "heavy")]
    holders += [Holder(permitted(limits, light, 5000), log, f"light {n}") for n in range(3)]
    await settle()
    for holder in [all_of_it, *holders]:
        holder.leave.set()
        await settle()
    await asyncio.gather(*(holder.task for holder in [all_of_it, *holders]))
    assert log == ["light 0", "heavy", "light 1", "light 2"]
    assert (limits.bytes.in_use, limits.broken) == (0, None)


def test_the_size_of_the_largest_answer_is_reduced_by_every_smaller_answer():
    model = small_limits().of_model("http://a", "m", now=0.0)

    def hear(size, status=200):
        model.heard(
            model.sent(0.0), classify(Reply(status=status, body=b'{"choices":"' + b"x" * size + b'"}'), now=0), 1.0
        )

    hear(1_000_000)
    for _ in range(100):
        hear(0, status=429)
    assert model.answer_bytes > 1_000_000
    for _ in range(50):
        hear(1000)
    assert 100_000 < model.answer_bytes < 500_000
    for _ in range(400):
        hear(1000)
    assert 1000 <= model.answer_bytes < 1100
    hear(50_000)
    assert model.answer_bytes >= 50_000
