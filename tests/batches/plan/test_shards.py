from dataclasses import asdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.plan.planfile import Entry
from batchwright.batches.plan.shards import BRANCH_REQUESTS_MIN, PlanRange, Shard, cut, divide


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


def test_a_limit_of_bytes_cuts_shards_like_a_limit_of_requests():
    assert counts(plan([1] * 8 + [2] * 7), bytes_max=100) == [8, 7]
    assert counts(plan([1] * 3, length=1000), bytes_max=100) == [1, 1, 1]


def test_the_defaults_are_a_thousand_requests_and_16_mebibytes():
    assert counts(plan([0] * 2500)) == [1000, 1000, 500]
    assert next(cut(plan([0] * 20, length=1024 * 1024))) == PlanRange(start=0, count=16, bytes=16 * 1024 * 1024)
    assert list(cut([])) == []


# Branches -------------------------------------------------------------------------------------------------------------


def whole(entries):
    return [
        Shard(batch_id="batch_1", model="small", number=number, start=one.start, count=one.count)
        for number, one in enumerate(cut(entries))
    ]


def divided(entries, workers):
    return [branch for shard in whole(entries) for branch in divide(shard, entries, workers)]


@given(st.integers(1, 4000), st.integers(1, 60), st.integers(1, 40))
def test_branches_partition_their_shards_and_each_has_its_own_journal(requests, group, workers):
    entries = plan([1 + at // group for at in range(requests)])
    branches = divided(entries, workers)
    assert [at for one in branches for at in range(one.start, one.start + one.count)] == list(range(requests))
    starts = {shard.number: shard.start for shard in whole(entries)}
    assert all(one.start == starts[one.number] + one.branch for one in branches)
    assert len({(one.number, one.journal_number(1)) for one in branches}) == len(branches)


def test_for_one_worker_shards_are_not_divided():
    entries = plan([0] * 2500)
    assert divided(entries, 1) == whole(entries)


def test_branches_get_smaller_towards_the_end_but_not_too_small():
    counts = [one.count for one in divided(plan([0] * 9000), 8)]
    assert (counts[0], counts[-1]) == (562, BRANCH_REQUESTS_MIN - 24)
    assert all(count >= BRANCH_REQUESTS_MIN // 2 for count in counts)
    assert 16 <= len([count for count in counts if count <= BRANCH_REQUESTS_MIN]) <= 24
    assert [one.count for one in divided(plan([0] * 1000), 8)] == [64] * 15 + [40]


def test_branches_are_cut_at_groups_that_end_in_their_last_quarter():
    entries = plan([1 + at // 30 for at in range(1000)])
    branches = divided(entries, 8)
    assert all(later.start % 30 == 0 for _, later in pairwise(branches))


def test_a_branch_knows_which_journals_may_hold_its_answers():
    shard = Shard(batch_id="batch_1", model="small", number=3, start=2000, count=1000)
    kept, (one, two) = shard.split(2400, 2700)
    assert [(each.start, each.count, each.branch) for each in (kept, one, two)] == [
        (2000, 400, 0),
        (2400, 300, 400),
        (2700, 300, 700),
    ]
    _, (three,) = two.split(2900)
    assert (three.branch, three.donors) == (900, [0, 700])
    journals = {each.branch: each.journal_number(5) for each in (kept, one, two, three)}
    assert [branch for branch, journal in journals.items() if three.may_be_in(journal)] == [0, 700, 900]
    assert [branch for branch, journal in journals.items() if kept.may_be_in(journal)] == [0]
    again = Shard(**{**asdict(shard), "round": 1})
    assert all(map(again.may_be_in, journals.values())), "answers of lines that are resent may be in any of them"
    assert Shard(**asdict(three)) == three
    assert [each.name for each in (kept, one)] == ["3", "3-400"]
