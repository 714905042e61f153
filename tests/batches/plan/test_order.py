from itertools import pairwise

from benchmarks.tools.prefixes import cached_share, requests
from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.plan.lines import LineCheck
from batchwright.batches.plan.order import BLOCK_BYTES, BLOCKS_MAX, chain, group, order, shared_blocks

# Prompts made of a few different blocks, so that many begin with the same blocks.
blocks = st.sampled_from([bytes([letter]) * BLOCK_BYTES for letter in b"ab"])
prompts = st.builds(lambda parts, rest: b"".join(parts) + rest, st.lists(blocks, max_size=8), st.binary(max_size=300))


def common_blocks(left, right):
    """How many full blocks two prompts have in common at their beginning, computed slowly."""
    count = 0
    while count < BLOCKS_MAX:
        here = slice(count * BLOCK_BYTES, (count + 1) * BLOCK_BYTES)
        if left[here] != right[here] or len(left[here]) < BLOCK_BYTES:
            break
        count += 1
    return count


@given(prompts, prompts)
def test_two_chains_are_equal_exactly_as_far_as_their_prompts(left, right):
    assert shared_blocks(chain(left), chain(right)) == common_blocks(left, right)


def test_a_chain_has_full_blocks_only_and_at_most_64():
    assert chain(b"x" * 255) == b""
    assert len(chain(b"x" * 256)) == len(chain(b"x" * 511)) == 8
    assert len(chain(b"x" * 1_000_000)) == 64 * 8


@given(st.lists(prompts, max_size=30))
def test_the_order_is_a_permutation_that_keeps_equal_chains_in_input_order(texts):
    chains = [chain(text) for text in texts]
    positions = order(chains).positions
    assert sorted(positions) == list(range(len(texts)))
    assert all(left < right for left, right in pairwise(positions) if chains[left] == chains[right])


@given(st.lists(prompts, max_size=30))
def test_prompts_with_the_same_leading_blocks_are_adjacent(texts):
    ordered = [texts[position] for position in order([chain(text) for text in texts]).positions]
    for depth in range(1, 9):
        met, before = set(), None
        for text in ordered:
            prefix = text[: depth * BLOCK_BYTES] if len(text) >= depth * BLOCK_BYTES else None
            if prefix is not None and prefix != before:
                assert prefix not in met
                met.add(prefix)
            before = prefix


@given(st.lists(prompts, max_size=30))
def test_prompts_that_differ_after_the_same_prefix_keep_the_order_of_the_input(texts):
    positions = order([chain(text) for text in texts]).positions
    for depth in range(9):
        firsts: dict[bytes, dict[bytes, int]] = {}
        for position in positions:
            text = texts[position]
            if len(text) < depth * BLOCK_BYTES:
                continue
            is_longer = len(text) >= (depth + 1) * BLOCK_BYTES
            branch = text[: (depth + 1) * BLOCK_BYTES] if is_longer else b"%d alone" % position
            branches = firsts.setdefault(text[: depth * BLOCK_BYTES], {})
            branches[branch] = min(position, branches.get(branch, position))
        for branches in firsts.values():
            assert list(branches.values()) == sorted(branches.values())


def test_requests_that_share_nothing_keep_the_order_of_the_input():
    chains = [chain(b"%d " % number * BLOCK_BYTES) for number in range(100)]
    assert order(chains).positions == list(range(100))


@given(st.lists(prompts, max_size=30))
def test_a_group_is_a_run_with_the_same_deepest_shared_prefix_of_at_least_a_kilobyte(texts):
    ordered = order([chain(text) for text in texts])
    sequence = [texts[position] for position in ordered.positions]
    deepest = []
    for here, text in enumerate(sequence):
        others = [common_blocks(text, other) for there, other in enumerate(sequence) if there != here]
        deepest.append(text[: max(others, default=0) * BLOCK_BYTES])
    for here in range(1, len(sequence)):
        together = ordered.groups[here] != 0 and ordered.groups[here] == ordered.groups[here - 1]
        assert together == (deepest[here] == deepest[here - 1] and len(deepest[here]) >= 1024)
    numbers = [number for number in ordered.groups if number]
    assert numbers == sorted(numbers)
    assert all(numbers.count(number) >= 2 for number in numbers)
    assert set(numbers) == set(range(1, len(set(numbers)) + 1))


def test_a_deeper_group_inside_a_wider_one_has_its_own_number():
    assert list(group([0, 4, 4, 6, 6, 4, 4])) == [1, 1, 2, 2, 2, 3, 3]


def test_a_shared_prefix_below_a_kilobyte_makes_no_group():
    assert list(group([0, 3, 3])) == [0, 0, 0]
    assert list(group([])) == []


def test_a_prefix_cache_reaches_nearly_its_best_hit_rate_only_in_our_order():
    check = LineCheck("/v1/chat/completions").check
    chains = [chain(check(line, 1).prompt) for line in requests(2000, 4000)]
    ordered = order(chains)
    sizes = [list(ordered.groups).count(number) for number in range(1, max(ordered.groups) + 1)]
    blocks_max = 4 * max(sizes) * 16
    ours = cached_share([chains[position] for position in ordered.positions], blocks_max)
    assert ours >= 0.95
    assert cached_share(chains, blocks_max) < ours - 0.2
