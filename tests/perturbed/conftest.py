"""All tests in this folder are always perturbed: with a fixed seed in `make test`, else with the seed of the run."""

from __future__ import annotations

import os
from random import Random

import pytest

from tests import perturb

SEEDS = ["random"] if perturb.is_on() else ["fixed"]
SCALE = 5 if perturb.LONG in os.environ else 1
"""How many times larger the tests are than in `make test`."""


@pytest.fixture(autouse=True, params=[pytest.param(name, marks=pytest.mark.perturbed(name)) for name in SEEDS])
def seed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chance() -> Random:
    """Random choices of a test, which depend on its seed as well."""
    return Random(perturb.current_seed())
