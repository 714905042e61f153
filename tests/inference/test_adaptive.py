"""The adaptive limit against every fixed one, on simulated servers: at least 90 % of the best, at most 2 % wasted."""

import functools

import pytest

from tests.inference.backends import Fixed, Queueing, Refusing, adaptive, run
from tests.support import sparsely

FIXED = (5, 10, 20, 40, 80, 160, 320)
BACKENDS = {
    "refuses beyond 64": lambda seed: Refusing(lambda _: 64, seed=seed),
    "refuses beyond 23, mixed lengths": lambda seed: Refusing(lambda _: 23, spread=0.8, seed=seed),
    "queues beyond 64": lambda seed: Queueing(64, seed=seed),
    "slows as more run": lambda seed: Queueing(256, step=0.2, slope=1 / 64, seed=seed),
    "browns out from 20 to 50": lambda seed: Refusing(lambda now: 8 if 20 < now < 50 else 64, seed=seed),
}


@functools.cache
def best_fixed(name):
    """Of fixed limits above the server's hard limit, one is enough: they only cause more refusals."""
    limits = FIXED if "queues" in name or "slows" in name else FIXED[:5]
    return max(run(BACKENDS[name](1), Fixed(limit)).answered for limit in limits)


@pytest.mark.parametrize("seed", sparsely([1, 2, 3], 3))
@pytest.mark.parametrize("name", BACKENDS)
def test_it_comes_close_to_the_best_fixed_limit(name, seed):
    seen = run(BACKENDS[name](seed), adaptive())
    assert seen.answered >= 0.9 * best_fixed(name)
    assert seen.wasted_of_all <= 0.02 * seen.calls


def test_it_does_not_overload_a_server_that_queues():
    limits = [run(Queueing(32, seed=seed), adaptive()).limits for seed in (1, 2, 3)]
    assert all(mean <= 4 * 32 for _, mean, _ in limits), limits


def test_it_waits_while_a_server_refuses_everything():
    seen = run(Refusing(lambda now: 0 if 20 < now < 50 else 64, seed=1), adaptive())
    assert seen.wasted_of_all <= 0.02 * seen.calls
    assert seen.answered >= 0.6 * best_fixed("refuses beyond 64")


def test_it_adapts_to_a_server_that_lost_half_of_its_replicas():
    seen = run(Refusing(lambda now: 64 if now < 30 else 32, seed=1), adaptive())
    assert seen.answered >= 0.9 * 0.5 * best_fixed("refuses beyond 64")
    assert seen.wasted_of_all <= 0.02 * seen.calls
