"""Figures that are committed, one small file per benchmark: the capacity page is generated from them.

A file holds numbers and facts about the machine, and nothing that says when or where they were taken.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "figures"
_FACTS = ("processors", "memory", "python", "system", "load")
_DIGITS = 4


def save(name: str, results: Mapping[str, Any], kept: Mapping[str, float | None]) -> None:
    """Write what the page needs from one run, whose JSON object is `results`; without figures, the file stays."""
    measured = {key: _rounded(value) for key, value in sorted(kept.items()) if value is not None}
    if not measured:
        return
    FOLDER.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "figures": measured,
        "is_quick": results["is_quick"],
        "machine": {
            **{fact: results["machine"][fact] for fact in _FACTS if fact in results["machine"]},
            "postgresql": results["server"]["server_version"].split()[0],
        },
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load(name: str) -> dict[str, float]:
    """The figures of the last saved run; empty if there is none."""
    file = FOLDER / f"{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["figures"]) if file.exists() else {}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
