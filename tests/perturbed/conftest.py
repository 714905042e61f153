"""Everything in this folder is always perturbed: by a fixed seed in `make test`, by the seed of the run otherwise."""

from __future__ import annotations

import os
from random import Random

import pytest

from tests import perturb

SEEDS = ["random"] if perturb.is_on() else ["fixed"]
SCALE = 5 if perturb.LONG in os.environ else 1
"""How many times as large the tests are as in `make test`."""


@pytest.fixture(autouse=True, params=[pytest.param(name, marks=pytest.mark.perturbed(name)) for name in SEEDS])
def seed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def chance() -> Random:
    """What a test does at random follows from its seed as well."""
    return Random(perturb.current_seed())
