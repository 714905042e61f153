"""`make bench-ingest` in its short form runs and reports its goals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.ingest import SECTIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_the_short_form_meets_the_goals_that_do_not_depend_on_the_load_of_the_machine():
    command = [sys.executable, "-m", "benchmarks.ingest", "--quick", "--json", "--only", "again"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=280, check=True)
    results = json.loads(done.stdout)
    assert results["failures"] == {}
    assert {goal["name"]: goal["met"] for goal in results["goals"]} == {
        "second run over the same folder: calls": True,
        "second run over the same folder: steps": True,
        "calls after editing 1 % of the text, section by section": True,
    }
    assert all(set(goal) == {"name", "goal", "value", "met"} for goal in results["goals"])


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.NAME)
def test_a_section_that_failed_names_its_goals_as_not_met(section):
    assert [goal.met for goal in section.goals(None)] == [False] * len(section.goals(None))
    assert [goal.value for goal in section.goals(None)] == [None] * len(section.goals(None))
