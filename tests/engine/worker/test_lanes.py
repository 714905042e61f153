"""Lanes: how many jobs of which queue a claim asks for, and where the next claim continues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from batchwright.engine.jobs import Claim, new_id
from batchwright.engine.queue import NOWHERE, Claimed
from batchwright.engine.worker.lanes import Lanes

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def claim(queue: str = "a", priority: int = 5, *, at: datetime = NOW, key: str | None = None) -> Claim:
    blank = dict.fromkeys(Claim.__dataclass_fields__)
    return Claim(
        **{**blank, "id": new_id(), "queue": queue, "priority": priority, "run_after": at, "exclusive_key": key}
    )


def lanes_of(*queues: str, **limits: int) -> Lanes:
    lanes = Lanes(None, limits)
    lanes.begin_scan()
    lanes.know(dict.fromkeys(queues, False))
    return lanes


def quotas(lanes: Lanes, slots: int, **running: int) -> dict[str, int]:
    return {lane.queue: lane.quota for lane in lanes.open(slots, running)}


def marks(lanes: Lanes, slots: int = 10) -> dict[tuple[str, int], object]:
    return {(lane.queue, lane.priority): lane.after for lane in lanes.open(slots, {})}


def test_running_jobs_do_not_reduce_the_quota_of_a_queue_without_a_limit():
    assert quotas(lanes_of("a"), 3, a=3) == {"a": 3}


def test_a_limit_counts_running_jobs_and_closes_a_full_queue():
    lanes = lanes_of("a", "b", "c", a=4, b=2)
    assert quotas(lanes, 10, a=3, b=2, c=9) == {"a": 1, "c": 10}


def test_priorities_come_before_queues_and_queues_take_turns():
    lanes = lanes_of("a", "b")
    first = [(lane.priority, lane.queue) for lane in lanes.open(1, {})]
    second = [(lane.priority, lane.queue) for lane in lanes.open(1, {})]
    assert [priority for priority, _ in first] == sorted(priority for priority, _ in first)
    assert {first[0][1], second[0][1]} == {"a", "b"}


def test_paused_queues_have_no_lanes():
    lanes = Lanes(["a", "b"], {})
    lanes.know({"a": True, "b": False})
    assert set(quotas(lanes, 5)) == {"b"}


def test_the_watermark_of_an_exhausted_lane_moves_to_just_before_the_claim():
    lanes = lanes_of("a")
    opened = lanes.open(10, {})
    lanes.move_on(opened, Claimed(NOW, [claim(at=NOW - timedelta(seconds=5))]), 10, 0.001)
    assert set(marks(lanes).values()) == {(NOW - timedelta(milliseconds=50), UUID(int=0))}


def test_a_full_claim_moves_the_watermarks_of_its_lanes_to_their_last_job():
    lanes = lanes_of("a")
    taken = [claim(at=NOW - timedelta(seconds=9 - n)) for n in range(3)]
    lanes.move_on(lanes.open(3, {}), Claimed(NOW, taken), 3, 0.001)
    after = marks(lanes)
    assert after[("a", 5)] == (taken[-1].run_after, taken[-1].id)
    assert after[("a", 6)] == NOWHERE


def test_keyed_jobs_do_not_move_a_watermark():
    lanes = lanes_of("a")
    lanes.move_on(lanes.open(1, {}), Claimed(NOW, [claim(key='["k"]', at=NOW - timedelta(seconds=1))]), 1, 0.001)
    assert marks(lanes)[("a", 5)] == NOWHERE


def test_a_queue_at_its_limit_does_not_count_as_exhausted():
    lanes = lanes_of("a", a=1)
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, [claim(priority=3, at=NOW - timedelta(seconds=1))]), 10, 0.001)
    assert marks(lanes)[("a", 5)] == NOWHERE


def test_a_full_scan_resets_the_watermarks():
    lanes = lanes_of("a")
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001)
    assert not lanes.scan_is_due
    lanes.scan_soon()
    assert lanes.scan_is_due
    lanes.begin_scan()
    assert set(marks(lanes).values()) == {NOWHERE}


def test_a_ring_says_how_far_to_look_back_in_its_queue():
    lanes = lanes_of("a", "b")
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001)
    horizon = marks(lanes)["b", 5]
    since = NOW - timedelta(seconds=2)
    lanes.look_back("a", since)
    lanes.look_back("a", NOW - timedelta(seconds=1))
    lanes.look_back("b", NOW)
    assert marks(lanes)["a", 5] == (since, UUID(int=0))
    assert marks(lanes)["b", 5] == horizon, "a later time moves nothing"


def test_a_ring_that_is_heard_during_a_claim_counts_for_the_next_one():
    """That claim may not have seen the commit that the ring is for."""
    lanes = lanes_of("a")
    opened = lanes.open(10, {})
    since = NOW - timedelta(seconds=2)
    lanes.look_back("a", since)
    lanes.move_on(opened, Claimed(NOW, []), 10, 0.001)
    assert marks(lanes)["a", 5] == (since, UUID(int=0))
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001)
    assert marks(lanes)["a", 5].run_after > since, "once is enough"


def test_no_watermark_passes_a_commit_of_our_own():
    """A parent that it releases has the time when the commit began."""
    lanes = lanes_of("a")
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001, committing_seconds=3.0)
    assert marks(lanes)["a", 5].run_after < NOW - timedelta(seconds=3)


def test_a_ring_for_an_unknown_queue_makes_a_full_scan_due():
    lanes = lanes_of("a")
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001)
    assert lanes.serves("a")
    assert not lanes.scan_is_due
    assert lanes.serves("new")
    assert lanes.scan_is_due
    assert not Lanes(["a"], {}).serves("b")


def test_a_ring_for_an_unknown_queue_during_a_scan_makes_another_one_due():
    """The queues of that scan were read before the ring."""
    lanes = lanes_of("a")
    opened = lanes.open(10, {})
    assert lanes.serves("new")
    lanes.move_on(opened, Claimed(NOW, []), 10, 0.001)
    assert lanes.scan_is_due


def test_a_scan_that_falls_due_during_a_claim_is_made_by_the_next_one(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("batchwright.engine.worker.lanes.time.monotonic", lambda: now)
    lanes = lanes_of("a")
    lanes.move_on(lanes.open(10, {}), Claimed(NOW, []), 10, 0.001)
    now += 0.9
    opened = lanes.open(10, {})
    now += 0.2
    lanes.move_on(opened, Claimed(NOW, []), 10, 0.2)
    assert lanes.scan_is_due


def test_a_scan_that_failed_is_made_again():
    lanes = lanes_of("a")
    lanes.open(10, {})
    assert lanes.scan_is_due
