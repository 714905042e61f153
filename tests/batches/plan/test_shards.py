from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.plan.planfile import Entry
from batchwright.batches.plan.shards import PlanRange, cut


def plan(groups, length=10):
    return [Entry(at * length, length, group) for at, group in enumerate(groups)]


def counts(entries, **limits):
    return [shard.count for shard in cut(entries, **limits)]


runs = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12)


@st.composite
def plans(draw):
    groups = [0 if alone else number for number, (size, alone) in enumerate(draw(runs), 1) for _ in range(size)]
    lengths = draw(st.lists(st.integers(1, 120), min_size=len(groups), max_size=len(groups)))
    return [Entry(at, length, group) for at, (length, group) in enumerate(zip(lengths, groups, strict=True))]


@given(plans(), st.integers(1, 10), st.integers(50, 400))
def test_shards_partition_the_plan_within_their_limits(entries, requests_max, bytes_max):
    shards = list(cut(entries, requests_max=requests_max, bytes_max=bytes_max))
    covered = [at for shard in shards for at in range(shard.start, shard.start + shard.count)]
    assert covered == list(range(len(entries)))
    for shard in shards:
        part = entries[shard.start : shard.start + shard.count]
        assert shard.bytes == sum(entry.length for entry in part)
        assert 1 <= shard.count <= requests_max
        assert shard.bytes <= bytes_max or shard.count == 1


@given(plans(), st.integers(1, 10), st.integers(50, 400))
def test_a_shard_is_cut_short_only_at_a_group_boundary_when_three_quarters_full(entries, requests_max, bytes_max):
    for shard in cut(entries, requests_max=requests_max, bytes_max=bytes_max):
        end = shard.start + shard.count
        if end == len(entries):
            continue
        full = shard.count == requests_max or shard.bytes + entries[end].length > bytes_max
        if not full:
            assert shard.count >= 0.75 * requests_max or shard.bytes >= 0.75 * bytes_max
            assert entries[end].group != entries[end - 1].group or entries[end].group == 0


def test_a_plan_is_cut_at_the_last_group_boundary_of_the_last_quarter():
    assert counts(plan([1] * 7 + [2] * 2 + [3] * 5), requests_max=10) == [9, 5]
    assert counts(plan([1] * 7 + [2] * 7), requests_max=10) == [10, 4]  # 7 of 10 is too early
    assert counts(plan([1] * 8 + [2] * 7), requests_max=10) == [8, 7]
    assert counts(plan([0] * 25), requests_max=10) == [10, 10, 5]
    assert counts(plan([1] * 8 + [2] * 2), requests_max=10) == [10]


def test_bytes_cut_like_requests():
    assert counts(plan([1] * 8 + [2] * 7), bytes_max=100) == [8, 7]
    assert counts(plan([1] * 3, length=1000), bytes_max=100) == [1, 1, 1]


def test_the_defaults_are_a_thousand_requests_and_16_mebibytes():
    assert counts(plan([0] * 2500)) == [1000, 1000, 500]
    assert next(cut(plan([0] * 20, length=1024 * 1024))) == PlanRange(start=0, count=16, bytes=16 * 1024 * 1024)
    assert list(cut([])) == []
