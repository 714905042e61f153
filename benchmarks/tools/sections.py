"""Benchmarks of several sections on one PostgreSQL: if one fails, that is a line in the report, and the others run.

A section is a module with NAME, TITLE, SECONDS_MAX, SETTINGS, `async measure(ground)`, `goals(figures)` and
`tables(figures)`. If it has `kept(figures)`, `--save` stores what that returns.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.tools import figures, measure, report
from benchmarks.tools.queue_results import machine
from benchmarks.tools.server import Server, server


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What all sections share."""

    folder: Path
    is_quick: bool
    server: Server
    tell: Callable[[str], None]

    def pick(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full


def main(
    name: str,
    description: str,
    sections: Sequence[ModuleType],
    make_ground: Callable[..., Ground] = Ground,
    server_settings: Mapping[str, str] | None = None,
) -> None:
    arguments = parse(name, description, sections)
    wanted = [section for section in sections if not arguments.only or section.NAME in arguments.only]
    with (
        tempfile.TemporaryDirectory(prefix="batchwright-bench-", ignore_cleanup_errors=True) as folder,
        server(arguments.database_url, server_settings) as running,
    ):
        ground = make_ground(folder=Path(folder), is_quick=arguments.quick, server=running, tell=tell)
        results = asyncio.run(measure_all(name, ground, wanted))
    if arguments.save:
        save(results, wanted)
    print(json.dumps(results, ensure_ascii=False, indent=2) if arguments.json else as_text(results, wanted))


def parse(name: str, description: str, sections: Sequence[ModuleType]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    parser.add_argument("--database-url", help="server to use; by default a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", help=f"some of {','.join(each.NAME for each in sections)}")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer runs; the figures are rough")
    parser.add_argument("--save", action="store_true", help="write the figures that docs/capacity.md needs")
    arguments = parser.parse_args()
    arguments.only = set(filter(None, arguments.only.split(",")))
    if unknown := arguments.only - {section.NAME for section in sections}:
        parser.error(f"there is no section {unknown.pop()!r}")
    return arguments


async def measure_all(name: str, ground: Ground, sections: Sequence[ModuleType]) -> dict[str, Any]:
    began, loop_before, load_before = time.monotonic(), measure.calibrate(), os.getloadavg()[0]
    results: dict[str, Any] = {"benchmark": name, "failures": {}, "figures": {}, "goals": [], "seconds": {}}
    results["is_quick"] = ground.is_quick
    for section in sections:
        ground.tell(f"{section.NAME}: {section.TITLE}")
        since, found = time.monotonic(), None
        try:
            async with asyncio.timeout(section.SECONDS_MAX):
                found = await section.measure(ground)
        except Exception as error:
            ground.tell(f"  {error!r}")
            results["failures"][section.NAME] = repr(error)
        results["figures"][section.NAME] = found
        results["goals"] += [goal.as_json() for goal in section.goals(found)]
        results["seconds"][section.NAME] = round(time.monotonic() - since, 1)
    results["machine"] = {
        **machine(),
        "load": f"{load_before:.1f} before and {os.getloadavg()[0]:.1f} after",
        "calibration loop": f"{loop_before:.0f} ms before and {measure.calibrate():.0f} ms after",
    }
    results["server"] = ground.server.describe()
    results["seconds"]["all"] = round(time.monotonic() - began, 1)
    return results


def save(results: dict[str, Any], sections: Sequence[ModuleType]) -> None:
    """A section that failed has no figures."""
    kept: dict[str, float | None] = {}
    for section in sections:
        if hasattr(section, "kept") and results["figures"][section.NAME] is not None:
            kept |= section.kept(results["figures"][section.NAME])
    figures.save(results["benchmark"], results, kept)


def as_text(results: dict[str, Any], sections: Sequence[ModuleType]) -> str:
    goals = [report.Goal(**goal) for goal in results["goals"]]
    missed = [goal.name for goal in goals if not goal.met]
    parts = [", ".join(f"{key} {value}" for key, value in {**results["machine"], **results["server"]}.items())]
    for section in sections:
        found = results["figures"][section.NAME]
        parts.append(f"{section.TITLE}  [{section.NAME}, {results['seconds'][section.NAME]:.0f} s]")
        if found is not None:
            parts.append(section.tables(found))
        else:
            parts.append(report.note("Failed", results["failures"][section.NAME]))
        parts.append(report.note("How", " ".join(section.SETTINGS.split())))
    parts.append(report.goal_table(goals))
    if results["is_quick"]:
        parts.append(report.note("Quick", "sizes and numbers of runs are smaller than the goals require"))
    parts.append(f"Missed: {'; '.join(missed)}." if missed else f"All {len(goals)} goals are met.")
    parts.append(f"{results['seconds']['all']:.0f} s in all")
    return "\n\n".join(parts)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
