"""The prefix cache against a plain LRU, and its counts."""

import random

from batchwright.simulator.prefix_cache import BLOCK_BYTES, PrefixCache, chain, tokens


def test_four_bytes_are_a_token():
    assert [tokens(b"x" * n) for n in (0, 1, 4, 5, 64)] == [0, 1, 1, 2, 16]


def test_a_chain_has_a_link_per_full_block_without_the_last_token():
    assert [len(chain(b"x" * n)) for n in (0, 1, 64, 65, 128, 129)] == [0, 0, 0, 1, 1, 2]


def test_equal_beginnings_have_equal_links_up_to_the_first_difference():
    one, other = b"a" * 640, b"a" * 200 + b"b" + b"a" * 439
    links, others = chain(one), chain(other)
    assert links[:3] == others[:3]
    assert not set(links[3:]) & set(others[3:])
    assert len(set(links)) == len(links)  # equal blocks at different positions are different blocks


def test_the_oldest_blocks_are_evicted_first_and_tails_before_heads():
    cache = PrefixCache(4)
    cache.store([1, 2, 3])
    cache.store([11, 12])
    assert (cache.find([1, 2, 3]), cache.find([11, 12]), len(cache)) == (2, 2, 4)
    cache.store([1, 2])
    cache.store([21])
    assert (cache.find([1, 2]), cache.find([11, 12]), cache.find([21])) == (2, 1, 1)


def test_a_prompt_longer_than_the_cache_keeps_its_head():
    cache = PrefixCache(3)
    cache.store(list(range(10)))
    assert cache.find(list(range(10))) == 3


def test_random_use_agrees_with_a_plain_lru():
    dice = random.Random(3)
    prompts = [bytes(dice.choices(b"ab", k=1)) * BLOCK_BYTES * dice.randrange(4) + b"%d" % dice.randrange(6) * 90
               for _ in range(400)]  # fmt: skip
    cache, plain = PrefixCache(12), []
    total = cached = 0
    seen = set()
    for prompt in prompts:
        links = chain(prompt)
        known = next((n for n, link in enumerate(links) if link not in plain), len(links))
        assert cache.find(links) == known
        total, cached, seen = total + len(links), cached + known, seen | set(links)
        cache.store(links)
        plain = [link for link in plain if link not in links] + links[::-1]
        plain = plain[-12:]
    assert (cache.total_blocks, cache.cached_blocks, cache.distinct_blocks) == (total, cached, len(seen))
    assert 0 < cached < total - len(seen)


def test_distinct_blocks_are_counted_up_to_a_limit_that_is_reported():
    cache = PrefixCache(100, seen_max=3)
    cache.find([1, 2])
    assert cache.is_exact
    cache.find([3, 4])
    assert not cache.is_exact
    cache.find([5])
    assert cache.distinct_blocks == 4
    cache.reset()
    assert (cache.is_exact, cache.total_blocks, len(cache)) == (True, 0, 0)
