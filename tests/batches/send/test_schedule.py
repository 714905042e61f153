"""Which request is sent next: order, turns, groups, retries and limits."""

import heapq
import os
import random
import statistics
import time
from collections import Counter
from itertools import count, groupby
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batches.plan.planfile import Entry
from batchwright.batches.send import schedule as module
from batchwright.batches.send.schedule import Schedule
from batchwright.errors import Conflict


def plan(*groups):
    """Entries with these groups, at offsets 0, 1, 2 and so on."""
    return [Entry(at, 1, group) for at, group in enumerate(groups)]


def lines(number):
    return plan(*[0] * number)


def take(schedule, number, now=0.0):
    """Hand out this number of requests, or as many as there are."""
    items = []
    while len(items) < number and (item := schedule.next(now)) is not None:
        items.append(item)
    return items


def offsets(items):
    return [item.entry.offset for item in items]


def batches(items):
    return [item.backlog.batch for item in items]


def drain(schedule, number, now=0.0):
    """Hand out requests, each answered before the next."""
    taken = []
    for _ in range(number):
        taken += take(schedule, 1, now)
        schedule.finished(taken[-1])
    return taken


class TestOneBatch:
    def test_entries_are_handed_out_in_plan_order(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(5))
        assert offsets(take(schedule, 9)) == [0, 1, 2, 3, 4]

    def test_shards_are_sent_in_the_order_of_their_numbers_not_of_their_arrival(self):
        schedule = Schedule()
        for shard in (2, 0, 1):
            schedule.add("b", "t", shard, lines(2))
        assert [item.backlog.shard for item in take(schedule, 9)] == [0, 0, 1, 1, 2, 2]

    def test_an_item_knows_its_entry_its_share_and_when_it_was_sent(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 3, [Entry(70, 9, 0)])
        (item,) = take(schedule, 1, now=12.5)
        assert (item.entry, item.backlog, item.tries) == (Entry(70, 9, 0), backlog, 0)
        assert (backlog.batch, backlog.shard) == ("b", 3)

    def test_a_share_counts_what_is_unsent_in_flight_and_retrying_until_it_is_empty(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(2))
        first, second = take(schedule, 2)
        schedule.again(first, due=5.0)
        assert (backlog.unsent, backlog.in_flight, backlog.retrying, backlog.is_empty) == (0, 1, 1, False)
        schedule.finished(second)
        assert not backlog.is_empty
        schedule.finished(schedule.next(5.0))
        assert backlog.is_empty

    def test_a_share_without_entries_is_empty_at_once(self):
        schedule = Schedule()
        assert schedule.add("b", "t", 0, []).is_empty
        assert schedule.next(0.0) is None
        assert schedule.most_urgent is None

    def test_a_shard_cannot_be_in_the_schedule_twice(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 4, lines(2))
        with pytest.raises(Conflict, match="shard 4 of batch b is in the schedule already; withdraw it first"):
            schedule.add("b", "t", 4, lines(1))
        item = schedule.next(0.0)
        schedule.withdraw(backlog)
        again = schedule.add("b", "t", 4, lines(1))
        schedule.finished(item)
        assert (backlog.is_empty, again.is_empty) == (True, False)

    def test_a_request_cannot_be_answered_twice(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, [*lines(1), Entry(30, 1, 0)])
        _, item = take(schedule, 2)
        schedule.finished(item)
        with pytest.raises(AssertionError, match="the request at 30 of batch b is not in flight"):
            schedule.finished(item)
        with pytest.raises(AssertionError, match="not in flight"):
            schedule.again(item, due=0.0)
        assert schedule.in_flight == 1


class TestRetries:
    def test_a_retry_is_not_sent_before_it_is_due_and_then_before_new_entries(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(4))
        first = schedule.next(0.0)
        assert schedule.again(first, due=2.0)
        assert offsets(take(schedule, 1, now=1.9)) == [1]
        assert schedule.next(2.0) is first
        assert offsets(take(schedule, 9, now=2.0)) == [2, 3]

    def test_a_retry_of_a_later_shard_goes_before_new_entries_of_an_earlier_one(self):
        schedule = Schedule()
        schedule.add("b", "t", 7, lines(1))
        item = schedule.next(0.0)
        schedule.add("b", "t", 1, lines(1))
        schedule.again(item, due=0.0)
        assert [item.backlog.shard for item in take(schedule, 2)] == [7, 1]

    def test_retries_go_in_the_order_in_which_they_are_due(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(3))
        for item, due in zip(take(schedule, 3), (3.0, 1.0, 2.0), strict=True):
            schedule.again(item, due)
        assert offsets(take(schedule, 3, now=9.0)) == [1, 2, 0]

    def test_retries_do_not_use_up_express(self):
        schedule = Schedule(express_requests=2)
        schedule.add("b", "t", 0, lines(3))
        item = schedule.next(0.0)
        for _ in range(5):
            schedule.again(item, due=0.0)
            schedule.next(0.0)
        schedule.add("other", "t", 0, lines(2))
        assert batches(take(schedule, 9)) == ["b", "other", "other", "b"]


class TestGroups:
    def test_followers_wait_until_their_leader_is_answered(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1, 1))
        leader = schedule.next(0.0)
        assert schedule.next(29.9) is None
        schedule.finished(leader)
        assert offsets(take(schedule, 9)) == [1, 2]

    def test_followers_go_when_their_leader_must_be_resent(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1, 1))
        schedule.again(schedule.next(0.0), due=100.0)
        assert offsets(take(schedule, 9, now=1.0)) == [1, 2]
        assert offsets(take(schedule, 9, now=100.0)) == [0]

    def test_followers_go_when_their_leader_is_30_seconds_old(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1, 1))
        leader = schedule.next(10.0)
        assert schedule.next(39.9) is None
        assert offsets(take(schedule, 1, now=40.0)) == [1]
        schedule.finished(leader)
        assert offsets(take(schedule, 9, now=40.0)) == [2]

    def test_while_a_group_waits_later_entries_go(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1, 0, 2, 2, 0))
        schedule.add("b", "t", 1, plan(0))
        assert [(item.backlog.shard, item.entry.offset) for item in take(schedule, 9)] == [
            (0, 0),
            (0, 2),
            (0, 3),
            (0, 5),
            (1, 0),
        ]

    def test_released_followers_go_to_the_front_in_plan_order(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1, 1, 2, 2, 2, 0, 0))
        first, second = take(schedule, 2)
        schedule.finished(second)
        assert offsets(take(schedule, 1)) == [4]
        schedule.finished(first)
        assert offsets(take(schedule, 9)) == [1, 2, 5, 6, 7]

    def test_after_the_release_a_share_goes_before_later_shards_again(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1))
        schedule.add("b", "t", 1, lines(3))
        leader, other = take(schedule, 2)
        schedule.finished(leader)
        assert [item.backlog.shard for item in take(schedule, 9)] == [0, 1, 1]
        assert other.backlog.shard == 1

    def test_each_shard_has_its_own_leader(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 1))
        schedule.add("b", "t", 1, plan(1, 1))
        leaders = take(schedule, 9)
        assert [(item.backlog.shard, item.entry.offset) for item in leaders] == [(0, 0), (1, 0)]
        schedule.finished(leaders[1])
        assert [(item.backlog.shard, item.entry.offset) for item in take(schedule, 9)] == [(1, 1)]

    def test_a_group_of_which_one_entry_is_left_waits_for_nobody(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, plan(1, 2, 3))
        assert offsets(take(schedule, 9)) == [0, 1, 2]
        assert schedule.next_due(0.0) is None


class TestClasses:
    def test_one_request_of_twenty_is_bulk_while_both_classes_have_work(self):
        schedule = Schedule()
        schedule.add("large", "t", 0, lines(1000))
        drain(schedule, 256)
        for number in range(4):
            schedule.add(f"small {number}", "t", 0, lines(100))
        order = batches(drain(schedule, 400))
        assert all("large" in order[at : at + 20] for at in range(380))
        assert order.count("large") == 20

    def test_express_ends_after_256_requests(self):
        schedule = Schedule()
        schedule.add("large", "t", 0, lines(1000))
        drain(schedule, 255)
        schedule.add("small", "t", 0, lines(100))
        assert batches(drain(schedule, 21)) == ["large"] + ["small"] * 19 + ["large"]

    def test_a_batch_at_risk_is_express_until_it_is_safe_again(self):
        schedule = Schedule()
        schedule.add("large", "t", 0, lines(1000))
        drain(schedule, 300)
        schedule.add("small", "t", 0, lines(100))
        schedule.change("large", at_risk=True)
        assert Counter(batches(drain(schedule, 20))) == {"large": 10, "small": 10}
        schedule.change("large", at_risk=False)
        assert Counter(batches(drain(schedule, 19))) == {"small": 19}

    def test_the_next_shard_of_a_batch_does_not_make_it_express_again(self):
        schedule = Schedule()
        schedule.add("large", "t", 0, lines(300))
        drain(schedule, 300)
        schedule.add("large", "t", 1, lines(300))
        schedule.add("small", "t", 0, lines(19))
        assert batches(drain(schedule, 20)) == ["small"] * 19 + ["large"]

    def test_express_goes_before_more_urgent_bulk(self):
        schedule = Schedule(express_requests=1)
        schedule.add("urgent", "t", 0, lines(9), priority=0)
        drain(schedule, 1)
        schedule.add("relaxed", "t", 0, lines(9), priority=9)
        assert batches(take(schedule, 2)) == ["relaxed", "urgent"]


class TestTurns:
    def test_inside_a_class_the_most_urgent_priority_goes_first(self):
        schedule = Schedule()
        for priority in (5, 9, 0):
            schedule.add(f"priority {priority}", "t", 0, lines(2), priority=priority)
        assert [name for name, _ in groupby(batches(take(schedule, 9)))] == ["priority 0", "priority 5", "priority 9"]

    def test_tenants_take_turns_by_weight(self):
        schedule = Schedule()
        schedule.add("a", "heavy", 0, lines(50), weight=3)
        schedule.add("b", "light", 0, lines(50))
        assert batches(take(schedule, 8)) == ["a", "a", "a", "b", "a", "a", "a", "b"]
        schedule.add("c", "heavy", 0, lines(1), weight=1)
        assert batches(take(schedule, 6)) == ["a", "b", "c", "b", "a", "b"]

    def test_a_tenant_that_leaves_does_not_lengthen_the_turn_of_another(self):
        schedule = Schedule()
        for name, weight in (("a", 3), ("b", 1), ("c", 1)):
            schedule.add(name, name, 0, lines(9), weight=weight)
        assert batches(take(schedule, 2)) == ["a", "a"]
        schedule.change("c", in_flight_max=0)
        assert batches(take(schedule, 3)) == ["a", "b", "a"]

    def test_a_tenant_that_leaves_during_its_turn_does_not_shorten_the_turns_of_others(self):
        schedule = Schedule()
        for name, weight in (("a", 5), ("b", 2)):
            schedule.add(name, name, 0, lines(9), weight=weight)
        assert batches(take(schedule, 1)) == ["a"]
        schedule.change("a", in_flight_max=0)
        schedule.add("c", "c", 0, lines(9))
        assert batches(take(schedule, 4)) == ["b", "b", "c", "b"]

    def test_a_tenant_gains_nothing_by_many_batches(self):
        schedule = Schedule()
        for number in range(10):
            schedule.add(f"many {number}", "many", 0, lines(20))
        schedule.add("one", "one", 0, lines(20))
        assert batches(take(schedule, 40)).count("one") == 20

    def test_the_batches_of_a_tenant_take_turns(self):
        schedule = Schedule()
        for name in "abc":
            schedule.add(name, "t", 0, lines(3))
        assert "".join(batches(take(schedule, 9))) == "abcabcabc"

    def test_fifty_lines_beside_fifty_thousand_of_another_tenant_are_sent_within_a_hundred_requests(self):
        schedule = Schedule()
        schedule.add("large", "a", 0, lines(50_000))
        schedule.add("small", "b", 0, lines(50))
        assert batches(take(schedule, 100)).count("small") == 50

    def test_a_tenant_that_comes_and_goes_gets_no_more_than_its_turn(self):
        schedule = Schedule()
        for name in ("a", "b"):
            schedule.add(name, name, 0, lines(50))
        schedule.add("capped", "c", 0, lines(50))
        schedule.change("capped", in_flight_max=1)
        assert batches(drain(schedule, 30)).count("capped") == 10


class TestControl:
    def test_nothing_of_a_batch_is_handed_out_while_its_cap_is_zero(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(3))
        item = schedule.next(0.0)
        schedule.change("b", in_flight_max=0)
        schedule.again(item, due=1.0)
        assert (schedule.next(5.0), schedule.next_due(5.0)) == (None, None)
        schedule.change("b", in_flight_max=None)
        assert (schedule.unsent, schedule.most_urgent) == (2, 5)
        assert offsets(take(schedule, 9, now=5.0)) == [0, 1, 2]

    def test_a_batch_can_be_changed_before_its_first_shard_arrives(self):
        schedule = Schedule()
        schedule.change("b", priority=2, in_flight_max=1)
        schedule.add("b", "t", 0, lines(3))
        assert (schedule.most_urgent, len(take(schedule, 9))) == (2, 1)

    def test_a_cap_limits_what_is_in_flight_and_none_lifts_it(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(9))
        schedule.change("b", in_flight_max=2)
        items = take(schedule, 9)
        assert len(items) == 2
        schedule.change("b", at_risk=True)
        assert schedule.next(0.0) is None
        schedule.finished(items[0])
        assert len(take(schedule, 9)) == 1
        schedule.change("b", in_flight_max=None)
        assert len(take(schedule, 9)) == 6

    def test_a_new_priority_counts_from_the_next_hand_out(self):
        schedule = Schedule()
        schedule.add("a", "t", 0, lines(9))
        schedule.add("b", "t", 0, lines(9))
        schedule.change("b", priority=1)
        assert batches(take(schedule, 3)) == ["b", "b", "b"]
        schedule.add("b", "t", 1, lines(9), priority=7)
        assert batches(take(schedule, 3)) == ["a", "a", "a"]

    def test_the_most_urgent_is_the_lowest_number_that_has_work(self):
        schedule = Schedule()
        schedule.add("a", "t", 0, lines(1), priority=1)
        schedule.add("b", "t", 0, lines(1), priority=4)
        assert schedule.most_urgent == 1
        schedule.finished(schedule.next(0.0))
        assert schedule.most_urgent == 4

    def test_the_number_of_remembered_batches_without_work_is_limited(self, monkeypatch):
        monkeypatch.setattr(module, "IDLE_BATCHES_MAX", 3)
        schedule = Schedule(express_requests=1)
        schedule.add("held", "t", 0, lines(1))
        for number in range(10):
            schedule.add(f"b{number}", "t", 0, lines(1), priority=0)
            drain(schedule, 1)
        assert list(schedule._idle) == ["b7", "b8", "b9"]
        assert list(schedule._active) == ["held"]
        schedule.change("b7", at_risk=True)
        schedule.change("new", in_flight_max=1)
        assert list(schedule._idle) == ["b9", "b7", "new"]

    def test_requests_held_back_by_a_cap_are_counted_whether_the_cap_or_the_shard_came_first(self):
        schedule = Schedule()
        schedule.change("early", in_flight_max=1)
        schedule.add("early", "t", 0, lines(5))
        schedule.add("late", "t", 0, lines(7))
        schedule.change("late", in_flight_max=2)
        assert schedule.held_back == (5 - 2) + (7 - 4)
        schedule.change("late", in_flight_max=None)
        assert schedule.held_back == 3
        drain(schedule, 12)
        schedule.add("early", "t", 1, lines(5))
        assert schedule.held_back == 3

    def test_capped_batches_without_work_here_cost_no_time(self):
        """The check whether a sender runs low happens before every request."""
        schedule = Schedule()
        for name in map(str, range(100)):
            schedule.change(name, in_flight_max=1)
            schedule.add(name, "t", 0, lines(1))
            drain(schedule, 1)
        assert len(schedule._capped) == 0
        schedule.change("0", in_flight_max=2)
        assert len(schedule._capped) == 0


class TestWithdraw:
    def test_it_returns_the_retries_and_then_the_unsent_entries_in_plan_order(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, plan(1, 1, 1, 0, 2, 2, 0, 0))
        first, alone, second = take(schedule, 3)
        schedule.finished(first)
        schedule.again(alone, due=50.0)
        alone.tries = 1
        taken = schedule.withdraw(backlog)
        assert offsets(taken) == [3, 1, 2, 5, 6, 7]
        assert [item.tries for item in taken] == [1, 0, 0, 0, 0, 0]
        assert (schedule.unsent, schedule.retrying, schedule.in_flight) == (0, 0, 1)
        assert schedule.next(100.0) is None
        assert not backlog.is_empty
        schedule.finished(second)
        assert backlog.is_empty

    def test_a_request_of_a_withdrawn_share_cannot_be_sent_again(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, plan(1, 1, 1))
        leader = schedule.next(0.0)
        schedule.withdraw(backlog)
        assert schedule.again(leader, due=1.0) is False
        assert (backlog.is_empty, schedule.next(9.0), schedule.next_due(0.0)) == (True, None, None)

    def test_other_shares_of_the_batch_continue(self):
        schedule = Schedule()
        backlogs = [schedule.add("b", "t", shard, plan(1, 1, 0)) for shard in range(2)]
        first, alone, *_ = take(schedule, 4)
        schedule.again(alone, due=1.0)
        schedule.again(first, due=1.0)
        schedule.withdraw(backlogs[0])
        assert schedule.next(29.0) is None
        assert [(item.backlog, item.entry.offset) for item in take(schedule, 9, now=30.0)] == [(backlogs[1], 1)]

    def test_a_retry_that_is_due_is_taken_back_too(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(2))
        for item in take(schedule, 2):
            schedule.again(item, due=1.0)
        first = schedule.next(1.0)
        assert offsets(schedule.withdraw(backlog)) == [1]
        assert schedule.next(1.0) is None
        schedule.finished(first)
        assert backlog.is_empty

    def test_it_leaves_the_order_of_the_others_as_it_was(self):
        schedule = Schedule()
        backlogs = {shard: schedule.add("b", "t", shard, lines(2)) for shard in (0, 5, 1)}
        for item, due in zip(take(schedule, 6), (0.0, 0.0, 5.0, 1.0, 9.0, 2.0), strict=True):
            schedule.again(item, due)
        schedule.withdraw(backlogs[0])
        assert [item.backlog.shard for item in take(schedule, 9, now=9.0)] == [1, 5, 1, 5]
        backlogs = {shard: schedule.add("new", "t", shard, lines(1)) for shard in (0, 5, 1)}
        schedule.withdraw(backlogs[0])
        assert [item.backlog.shard for item in take(schedule, 9, now=9.0)] == [1, 5]

    def test_a_second_withdrawal_returns_nothing(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(3))
        assert len(schedule.withdraw(backlog)) == 3
        assert schedule.withdraw(backlog) == []

    def test_an_empty_share_is_withdrawn_without_a_trace(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(1))
        drain(schedule, 1)
        assert schedule.withdraw(backlog) == []

    def test_a_batch_that_may_send_nothing_may_be_withdrawn(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(3))
        schedule.add("other", "t", 0, lines(4))
        schedule.change("b", in_flight_max=0)
        assert len(schedule.withdraw(backlog)) == 3
        assert schedule.unsent == 4


class TestNextDue:
    def test_it_is_the_earliest_time_of_retries_and_old_leaders(self):
        schedule = Schedule()
        schedule.add("a", "t", 0, plan(1, 1))
        schedule.add("b", "t", 0, lines(1))
        _, item = take(schedule, 2, now=1.0)
        assert schedule.next_due(1.0) == 31.0
        schedule.again(item, due=7.0)
        assert schedule.next_due(1.0) == 7.0
        assert schedule.next(6.9) is None
        assert batches(take(schedule, 9, now=7.0)) == ["b"]
        assert batches(take(schedule, 9, now=31.0)) == ["a"]
        assert schedule.next_due(31.0) is None

    def test_it_ignores_requests_that_wait_for_more_than_time(self):
        schedule = Schedule()
        for name in ("answered", "capped", "closed"):
            schedule.add(name, "t", 0, plan(1, 1))
        answered, *_ = take(schedule, 3)
        schedule.finished(answered)
        schedule.change("closed", in_flight_max=0)
        schedule.change("capped", in_flight_max=1)
        assert schedule.next_due(0.0) is None
        schedule.change("capped", in_flight_max=2)
        assert schedule.next_due(0.0) == 30.0

    def test_it_ignores_requests_that_are_ready_already(self):
        schedule = Schedule()
        schedule.add("b", "t", 0, lines(2))
        for item, due in zip(take(schedule, 2), (1.0, 2.0), strict=True):
            schedule.again(item, due)
        assert schedule.next_due(1.5) == 2.0
        assert schedule.next_due(2.0) is None


class Request:
    """One request of the reference, with its whole history."""

    def __init__(self, backlog, entry, leader):
        self.backlog = backlog
        self.entry = entry
        self.leader = leader  # None: it leads, or has no group
        self.state = "unsent"
        self.due = None
        self.item = None
        self.first_sent_at = None
        self.lets_go = False  # whether its followers may be sent

    @property
    def is_free(self):
        return self.leader is None or self.leader.lets_go

    @property
    def too_old_at(self):
        return inf if self.first_sent_at is None else self.first_sent_at + Reference.LEADER_SECONDS


class Reference:
    """The rules, written simply and slowly: each method looks at all requests.

    It does not say which request is next, but which ones may be next: requests that become ready at the same moment
    have no order.
    """

    EXPRESS = 6
    EVERY = 4
    LEADER_SECONDS = 5.0

    def __init__(self):
        self.requests = []
        self.batches = {}
        self.weights = {}
        self.places = {}  # batch -> (is bulk, priority), while it may send
        self.batch_since = {}  # batch -> the step at which it came or had its last turn
        self.tenant_since = {}  # (place, tenant) -> the same
        self.bursts = {}  # place -> (tenant, turns left)
        self.passed_over = 0
        self.steps = count()

    def batch(self, name):
        new = {"tenant": None, "priority": 5, "at_risk": False, "cap": None, "handed_out": 0}
        return self.batches.setdefault(name, new)

    def of(self, *states, backlog=None, batch=None):
        return [
            request
            for request in self.requests
            if request.state in states
            and (backlog is None or request.backlog is backlog)
            and (batch is None or request.backlog.batch == batch)
        ]

    def add(self, backlog, entries):
        before = leader = None
        for entry in entries:
            if before is None or entry.group == 0 or entry.group != before.group:
                leader = None
            request = Request(backlog, entry, leader)
            self.requests.append(request)
            leader, before = leader or request, entry

    def hear(self, now):
        """Update states to the time `now`, which the schedule does only when it is called."""
        for request in self.requests:
            if request.state == "waiting" and request.due <= now:
                request.state = "due"
            for each in filter(None, (request, request.leader)):
                each.lets_go = each.lets_go or each.too_old_at <= now
        self.look()

    def may_send(self, name):
        batch = self.batches[name]
        return batch["cap"] is None or len(self.of("in flight", batch=name)) < batch["cap"]

    def may_be_next(self, name):
        """The requests of a batch that may be next: due retries, else the first entry that waits for no leader."""
        if not self.may_send(name):
            return []
        free = [request for request in self.of("unsent", batch=name) if request.is_free]
        free.sort(key=lambda request: (request.backlog.shard, request.entry.offset))
        return self.of("due", batch=name) or free[:1]

    def look(self):
        """Record which batches may send now, and since which step they and their tenants may."""
        self.requests = [request for request in self.requests if request.state != "gone"]
        step, before, self.places = next(self.steps), self.places, {}
        for name, batch in self.batches.items():
            if self.may_be_next(name):
                is_bulk = not batch["at_risk"] and batch["handed_out"] >= self.EXPRESS
                self.places[name] = (is_bulk, batch["priority"])
                if before.get(name) != self.places[name]:
                    self.batch_since[name] = step
        there = {(place, self.batches[name]["tenant"]) for name, place in self.places.items()}
        self.tenant_since = {key: self.tenant_since.get(key, step) for key in there}
        self.bursts = {place: burst for place, burst in self.bursts.items() if (place, burst[0]) in there}

    @property
    def both_have_work(self):
        return len({is_bulk for is_bulk, _ in self.places.values()}) == 2

    def acceptable(self):
        """All requests that may be the next one."""
        if not self.places:
            return []
        choose = max if self.both_have_work and self.passed_over >= self.EVERY - 1 else min
        is_bulk = choose(is_bulk for is_bulk, _ in self.places.values())
        place = min(place for place in self.places.values() if place[0] == is_bulk)
        inside = [name for name, where in self.places.items() if where == place]
        tenants = first((self.batches[name]["tenant"] for name in inside), lambda each: self.tenant_since[place, each])
        if place in self.bursts:
            tenants = {self.bursts[place][0]}
        return [
            request
            for tenant in tenants
            for name in first((each for each in inside if self.batches[each]["tenant"] == tenant), self.batch_since.get)
            for request in self.may_be_next(name)
        ]

    def hand_out(self, request, item, now):
        name = request.backlog.batch
        batch, place = self.batches[name], self.places[name]
        self.passed_over = 0 if place[0] else self.passed_over + self.both_have_work
        self.batch_since[name] = next(self.steps)
        tenant, left = self.bursts.pop(place, (batch["tenant"], self.weights[batch["tenant"]]))
        if left > 1:
            self.bursts[place] = (tenant, left - 1)
        else:
            self.tenant_since[place, tenant] = next(self.steps)
        if request.state == "unsent":
            batch["handed_out"] += 1
            request.first_sent_at = now
        request.state, request.item = "in flight", item
        self.look()

    def next_due(self):
        retries = [each.due for each in self.of("waiting") if self.may_send(each.backlog.batch)]
        followers = [each for each in self.of("unsent") if not each.is_free and self.may_send(each.backlog.batch)]
        due = min([*retries, *(each.leader.too_old_at for each in followers)], default=inf)
        return None if due == inf else due


def first(candidates, since):
    """Those that have waited longest."""
    candidates = set(candidates)
    earliest = min(map(since, candidates))
    return {each for each in candidates if since(each) == earliest}


class Duel:
    """Applies the same random moves to the schedule and to the reference, and compares them after each move."""

    MOVES = {
        "add": 6,
        "cap": 4,
        "change": 2,
        "finish": 14,
        "hand_out": 16,
        "offer": 4,
        "pass_time": 6,
        "send_again": 9,
        "sleep_until_due": 2,
        "withdraw": 2,
    }
    NAMES = ("a1", "a2", "a3", "b1", "b2", "c1")  # the letter is the tenant
    OPEN = ("unsent", "in flight", "waiting", "due", "offered")

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = 0.0
        self.offset = count()
        self.reference = Reference()
        self.schedule = Schedule(Reference.EXPRESS, Reference.EVERY, Reference.LEADER_SECONDS)
        self.backlogs = []

    def play(self, steps):
        for move in self.random.choices(list(self.MOVES), list(self.MOVES.values()), k=steps):
            getattr(self, move)()
            self.reference.look()
            self.compare()
        self.play_to_the_end()

    def some_batch(self):
        name = self.random.choice(self.NAMES)
        return name, self.reference.batch(name)

    def add(self):
        name, batch = self.some_batch()
        shard = self.random.randrange(4)
        groups = [group for number in (1, 0, 2, 3) for group in [number] * self.random.choice([0, 1, 2, 5])]
        entries = [Entry(next(self.offset), 1, group) for group in groups]
        held = [backlog for backlog in self.backlogs if (backlog.batch, backlog.shard) == (name, shard)]
        if any(not backlog.is_withdrawn and not backlog.is_empty for backlog in held):
            with pytest.raises(Conflict):
                self.schedule.add(name, name[0], shard, entries)
            return
        priority, weight = self.random.choice([None, None, 1, 5]), self.random.choice([None, 1, 2, 3])
        backlog = self.schedule.add(name, name[0], shard, entries, priority=priority, weight=weight)
        self.backlogs.append(backlog)
        batch |= {"tenant": name[0], "priority": batch["priority"] if priority is None else priority}
        self.reference.weights[name[0]] = weight or self.reference.weights.get(name[0], 1)
        self.reference.add(backlog, entries)

    def hand_out(self, times=None):
        for _ in range(times or self.random.randint(1, 8)):
            self.reference.hear(self.now)
            acceptable = self.reference.acceptable()
            item = self.schedule.next(self.now)
            if item is None:
                assert acceptable == []
                return
            assert item.entry in [request.entry for request in acceptable]
            (request,) = [request for request in acceptable if request.entry == item.entry]
            assert (request.backlog, request.item or item) == (item.backlog, item)
            self.reference.hand_out(request, item, self.now)

    def land(self, state):
        request = self.random.choice(self.reference.of("in flight"))
        request.state = "gone" if request.backlog.is_withdrawn else state
        request.lets_go = True
        return request

    def finish(self):
        for _ in range(min(self.random.randint(1, 6), self.schedule.in_flight)):
            self.schedule.finished(self.land("gone").item)
            self.reference.look()

    def send_again(self):
        for _ in range(min(self.random.randint(1, 4), self.schedule.in_flight)):
            request = self.land("waiting")
            request.due = self.now + self.random.choice([-1.0, 0.0, 1.0, 2.0, 7.0])
            assert self.schedule.again(request.item, request.due) is not request.backlog.is_withdrawn
            self.reference.look()

    def change(self):
        name, batch = self.some_batch()
        changes = {"priority": self.random.choice([None, 1, 5]), "at_risk": self.random.choice([None, False, True])}
        self.schedule.change(name, **changes)
        batch |= {key: value for key, value in changes.items() if value is not None}

    def cap(self):
        name, batch = self.some_batch()
        batch["cap"] = self.random.choice([None, 0, 1, 3])
        self.schedule.change(name, in_flight_max=batch["cap"])

    def withdraw(self):
        backlog = self.random.choice(self.backlogs[-6:] or [self.schedule.add("a1", "a", 9, [])])
        waiting = self.reference.of("waiting", "due", backlog=backlog)
        unsent = self.reference.of("unsent", backlog=backlog)
        taken = self.schedule.withdraw(backlog)
        assert {id(item) for item in taken[: len(waiting)]} == {id(request.item) for request in waiting}
        assert [item.entry for item in taken[len(waiting) :]] == [request.entry for request in unsent]
        for request in [*waiting, *unsent]:
            request.state = "gone"

    def offer(self):
        """End an open offer, or make a new one."""
        if out := [backlog for backlog in self.backlogs if backlog.offered]:
            self.conclude(self.random.choice(out), is_given=self.random.random() < 0.5)
            return
        backlog = self.random.choice(self.backlogs[-6:] or [self.schedule.add("a1", "a", 9, [])])
        wanted = self.random.choice([1, 2, 4, 50])
        taken = self.schedule.offer(backlog, wanted)
        unsent = self.reference.of("unsent", backlog=backlog)
        last = unsent[len(unsent) - len(taken) :]
        assert len(taken) <= wanted
        assert list(taken) == [request.entry for request in last]
        assert all(each.leader is None or each.leader.state == "unsent" for each in last), "groups that have begun stay"
        for request in last:
            request.state = "offered"

    def conclude(self, backlog, *, is_given):
        offered = self.reference.of("offered", backlog=backlog)
        self.schedule.conclude(backlog, is_given=is_given)
        for request in offered:
            request.state = "gone" if is_given or backlog.is_withdrawn else "unsent"
            if request.leader is not None and request.leader.state != "unsent":  # it was sent meanwhile
                request.leader = next((each for each in offered if each.entry.group == request.entry.group), None)
                request.leader = None if request.leader is request else request.leader
        assert not backlog.offered

    def pass_time(self):
        self.now += self.random.choice([0.5, 1.0, 3.0])

    def sleep_until_due(self):
        """Send what can be sent, then sleep until something is due, as the sender does."""
        self.hand_out(1000)
        due = self.schedule.next_due(self.now)
        assert due == self.reference.next_due()
        if due is not None:
            before, self.now = self.now, due
            assert before < due
            self.reference.hear(self.now)
            assert self.reference.acceptable()
            self.hand_out(1)

    def compare(self):
        reference, schedule = self.reference, self.schedule
        assert schedule.in_flight == len(reference.of("in flight"))
        assert schedule.retrying == len(reference.of("waiting", "due"))
        assert schedule.unsent == len(reference.of("unsent"))
        active = {request.backlog.batch for request in reference.of(*self.OPEN)}
        assert schedule.most_urgent == min((reference.batches[name]["priority"] for name in active), default=None)
        counted = Counter((request.backlog, request.state) for request in reference.requests)
        for backlog in self.backlogs:
            unsent, in_flight, waiting, due, offered = (counted[backlog, state] for state in self.OPEN)
            assert (backlog.unsent, backlog.in_flight, backlog.retrying) == (unsent, in_flight, waiting + due)
            assert len(backlog.offered) == offered
            assert backlog.left == unsent + in_flight + waiting + due + offered
            assert backlog.is_empty == (backlog.left == 0)

    def play_to_the_end(self):
        """Check that all requests are handed out once nothing holds them back."""
        for backlog in [each for each in self.backlogs if each.offered]:
            self.conclude(backlog, is_given=False)
            self.reference.look()
        for name in self.NAMES:
            self.schedule.change(name, in_flight_max=None)
            self.reference.batch(name)["cap"] = None
            self.reference.look()
        self.now += 10.0
        for _ in range(3):  # leaders and retries, then followers, then nothing
            self.hand_out(10_000)
            for request in self.reference.of("in flight"):
                request.state, request.lets_go = "gone", True
                self.schedule.finished(request.item)
                self.reference.look()
        self.compare()
        assert all(backlog.is_empty for backlog in self.backlogs)
        assert (self.schedule.next(self.now), self.schedule.next_due(self.now)) == (None, None)


@settings(max_examples=int(os.environ.get("BATCHWRIGHT_TEST_MODEL_EXAMPLES", "20")), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 150))
def test_after_any_moves_only_requests_that_the_rules_allow_are_handed_out(seed, steps):
    Duel(seed).play(steps)


class TestSpeed:
    def test_a_hand_out_costs_the_same_however_much_is_queued(self):
        few, many = (min(self.seconds(entries) for _ in range(5)) for entries in (100, 2_500))
        assert many < 3 * few
        assert many / 1000 < 25e-6

    @staticmethod
    def seconds(entries):
        """The seconds for 1,000 hand-outs and answers, with 20 batches of this many entries in groups of five."""
        schedule = Schedule()
        for number in range(20):
            schedule.add(f"b{number}", f"t{number % 5}", 0, plan(*(1 + at // 5 for at in range(entries))))
        flying = take(schedule, 100)
        start = time.process_time()
        for _ in range(1000):
            schedule.finished(flying.pop(0))
            flying += take(schedule, 1)
        return time.process_time() - start


class SimulatedSender:
    """A sender with ten in flight. Answer times vary as in the simulator, and are the same for a line in each run."""

    LIMIT = 10
    SIGMA = 0.6

    def __init__(self, seed):
        self.seed = seed
        self.schedule = Schedule()
        self.now = 0.0
        self.answers = []
        self.number = count()

    def answer_one(self):
        while self.schedule.in_flight < self.LIMIT and (item := self.schedule.next(self.now)) is not None:
            line = random.Random(f"{self.seed} {item.backlog.batch} {item.entry.offset}")
            answer = (self.now + line.lognormvariate(0, self.SIGMA), next(self.number), item)
            heapq.heappush(self.answers, answer)
        self.now, _, item = heapq.heappop(self.answers)
        self.schedule.finished(item)


class TestBesideALargeBatch:
    def test_fifty_lines_of_the_same_tenant_take_at_most_a_fifth_longer_than_alone(self):
        large = lines(50_000)
        alone = statistics.median(self.seconds(seed) for seed in range(20))
        beside = statistics.median(self.seconds(seed, large) for seed in range(20))
        assert beside <= 1.2 * alone

    @staticmethod
    def seconds(seed, large=()):
        """The seconds from the arrival of the small batch, after 300 answers of the large one, to its last answer."""
        sender = SimulatedSender(seed)
        if large:
            sender.schedule.add("large", "t", 0, large)
            for _ in range(300):
                sender.answer_one()
        arrival = sender.now
        small = sender.schedule.add("small", "t", 0, lines(50))
        while not small.is_empty:
            sender.answer_one()
        return sender.now - arrival


class TestHoldingLeadersBack:
    def test_no_new_group_begins_while_enough_entries_wait_for_their_leaders(self):
        schedule = Schedule()
        schedule.followers_max = 4
        schedule.add("b", "t", 0, plan(1, 1, 1, 2, 2, 2, 3, 3, 3))
        first, second = schedule.next(0), schedule.next(0)
        assert [item.entry.offset for item in (first, second)] == [0, 3]
        assert schedule.next(0) is None
        schedule.finished(first)
        assert [schedule.next(0).entry.offset for _ in range(2)] == [1, 2]
        assert schedule.next(0).entry.offset == 6

    def test_entries_without_a_group_and_retries_are_not_held_back(self):
        schedule = Schedule()
        schedule.followers_max = 1
        schedule.add("b", "t", 0, plan(1, 1, 1, 0, 2, 2))
        leader, single = schedule.next(0), schedule.next(0)
        assert [leader.entry.offset, single.entry.offset] == [0, 3]
        assert schedule.next(0) is None
        assert schedule.again(single, 5.0)
        assert schedule.next(4) is None
        assert schedule.next(6) is single

    def test_followers_of_a_withdrawn_share_hold_no_group_back(self):
        schedule = Schedule()
        schedule.followers_max = 2
        backlog = schedule.add("b", "t", 0, plan(1, 1, 1))
        schedule.add("c", "t", 0, plan(1, 1, 1))
        assert schedule.next(0) is not None
        assert schedule.next(0) is None
        schedule.withdraw(backlog)
        assert schedule.next(0).backlog.batch == "c"

    def test_a_leader_that_is_too_old_holds_no_group_back(self):
        schedule = Schedule(leader_seconds=30.0)
        schedule.followers_max = 2
        schedule.add("b", "t", 0, plan(1, 1, 1, 2, 2))
        schedule.next(0)
        assert schedule.next(29) is None
        assert [schedule.next(31).entry.offset for _ in range(3)] == [1, 2, 3]

    def test_a_batch_that_is_held_back_leaves_its_turns_to_the_others(self):
        schedule = Schedule()
        schedule.followers_max = 2
        schedule.add("grouped", "t", 0, plan(1, 1, 1, 2, 2, 2), priority=1)
        schedule.add("single", "t", 0, plan(0, 0, 0), priority=5)
        leader = schedule.next(0)
        assert [schedule.next(0).backlog.batch for _ in range(3)] == ["single"] * 3
        assert schedule.next(0) is None
        schedule.finished(leader)
        assert [schedule.next(0).entry.offset for _ in range(3)] == [1, 2, 3]

    def test_a_batch_that_was_held_back_has_its_turn_once_another_group_may_begin(self):
        schedule = Schedule()
        schedule.followers_max = 2
        for name in "abc":
            schedule.add(name, name, 0, plan(1, 1, 1))
        first = schedule.next(0)
        assert (first.backlog.batch, schedule.next(0)) == ("a", None)
        schedule.finished(first)
        assert {schedule.next(0).backlog.batch for _ in range(3)} == {"a", "b"}
        assert schedule.next(0) is None
        schedule.followers_max = 3
        assert schedule.next(0).backlog.batch == "c"


class TestOffers:
    def test_the_last_entries_are_set_aside_until_the_offer_ends(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(10))
        take(schedule, 1)
        assert [entry.offset for entry in schedule.offer(backlog, 4)] == [6, 7, 8, 9]
        assert offsets(take(schedule, 9)) == [1, 2, 3, 4, 5]
        assert (schedule.unsent, backlog.left) == (0, 10)
        schedule.conclude(backlog, is_given=False)
        assert offsets(take(schedule, 9)) == [6, 7, 8, 9]

    def test_entries_that_were_given_away_are_not_waited_for(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(4))
        items = take(schedule, 2)
        schedule.offer(backlog, 9)
        for item in items:
            schedule.finished(item)
        assert not backlog.is_empty, "until the offer ends, the entries may have to be sent here"
        schedule.conclude(backlog, is_given=True)
        assert backlog.is_empty
        assert schedule.next(0.0) is None

    def test_an_offer_always_leaves_something_here(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(3))
        assert [entry.offset for entry in schedule.offer(backlog, 9)] == [1, 2]
        schedule.conclude(backlog, is_given=True)
        assert schedule.offer(backlog, 9) == ()

    def test_an_offer_is_cut_at_a_group_if_one_begins_near_its_end_and_contains_no_group_that_has_begun(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, plan(1, 1, 1, 2, 2, 2, 3, 3, 3, 3))
        assert [entry.offset for entry in schedule.offer(backlog, 5)] == [6, 7, 8, 9]
        schedule.conclude(backlog, is_given=False)
        take(schedule, 2)
        assert [entry.offset for entry in schedule.offer(backlog, 9)] == [6, 7, 8, 9]

    def test_a_withdrawn_backlog_drops_its_offer_and_makes_no_new_one(self):
        schedule = Schedule()
        backlog = schedule.add("b", "t", 0, lines(4))
        schedule.offer(backlog, 2)
        assert [item.entry.offset for item in schedule.withdraw(backlog)] == [0, 1]
        schedule.conclude(backlog, is_given=False)
        assert (backlog.is_empty, schedule.unsent, schedule.next(0.0)) == (True, 0, None)
        assert schedule.offer(backlog, 2) == ()
