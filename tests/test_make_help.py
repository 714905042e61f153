"""`make help` lists the targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
INNER = {"collect"}
"""Targets that only other targets need."""


def test_make_help_lists_every_target_under_a_heading() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    listed = re.findall(r"^  (\S+) +\S", shown, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", makefile, re.MULTILINE))
    assert set(listed) == targets - INNER, "write `## text` behind a new target"
    assert len(listed) == len(set(listed))
    assert max(map(len, shown.splitlines())) <= 96
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].replace("\\", " ").split()) == targets
