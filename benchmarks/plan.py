"""Checking and planning 50,000 requests in 200 MB, and what the order is worth to a server's prefix cache.

    python -m benchmarks.plan [--json] [--requests N] [--rounds N]

Every round is a process of its own. Its memory is the peak of the resident set less what it had after its imports.
Seconds are the median of the rounds; CPU seconds are shown beside those of the clock, because machines are shared.
The cache model processes one request after the other, in blocks of 256 bytes of the prompt, and holds four times the
blocks of the largest group. Its share is relative to the blocks that could be found at most.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from batchwright.batches.plan import lines, order, plan, planfile
from benchmarks.tools import measure, prefixes, report

ENDPOINT = "/v1/chat/completions"
LINE_BYTES = 4180
SECONDS_MAX = 1.5
MEGABYTES_MAX = 40
SHARE_MIN = 95


def main() -> None:
    arguments = parse()
    if arguments.round:
        print(json.dumps(one_round(arguments.round, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure_all(Path(folder), arguments)
    print(json.dumps(results, indent=2) if arguments.json else as_text(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.plan", description="Checking, planning and ordering.")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def measure_all(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    good = folder / "good.jsonl"
    size = prefixes.write(good, arguments.requests, LINE_BYTES)
    accents = variant(good, "accents", b" is ", " ü ".encode())
    bad = variant(good, "bad", b'"POST"', b'"GET" ')
    cases = {
        "ASCII": rounds(good, arguments.rounds),
        "with accents": rounds(accents, arguments.rounds),
        "every line bad": rounds(bad, arguments.rounds),
    }
    shares = order_shares(good)
    return {
        "goals": [goal.as_json() for goal in goals(cases, shares)],
        "calibration_milliseconds": measure.calibrate(),
        "cases": cases,
        "file": {"requests": arguments.requests, "bytes": size},
        "prefix_cache_percent": shares,
        "split_microseconds": split_microseconds(good),
        "versions": {"msgspec": msgspec.__version__, "xxhash": xxhash.VERSION, "python": sys.version.split()[0]},
    }


def variant(file: Path, name: str, old: bytes, new: bytes) -> Path:
    """The same file, as long, with something replaced in every line."""
    other = file.with_stem(name)
    with file.open("rb") as source, other.open("wb") as target:
        target.writelines(line.replace(old, new) for line in source)
    return other


def rounds(file: Path, count: int) -> dict[str, float]:
    results = []
    for number in range(count):
        folder = file.parent / f"{file.stem}-{number}"
        command = [sys.executable, "-m", "benchmarks.plan", "--round", str(file), "--folder", str(folder)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout))
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def one_round(file: Path, folder: Path) -> dict[str, float]:
    idle = resident_megabytes()
    clock, processor = time.perf_counter(), time.process_time()
    draft = plan.read(file, plan.Rules(endpoint=ENDPOINT))
    read_seconds = time.perf_counter() - clock
    if draft.problems.total == 0:
        plan.write(draft, folder)
    return {
        "seconds": time.perf_counter() - clock,
        "processor_seconds": time.process_time() - processor,
        "read_seconds": read_seconds,
        "megabytes_above_idle": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - idle,
        "problems": draft.problems.total,
    }


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith("VmRSS")) / 1024


def order_shares(file: Path) -> dict[str, float]:
    """In percent, as if all requests were for one model."""
    chains, systems = [], []
    check = lines.LineCheck(ENDPOINT).check
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            found = check(line, number)
            assert isinstance(found, lines.GoodLine)
            chains.append(order.chain(found.prompt))
            systems.append(xxhash.xxh32_intdigest(json.loads(found.prompt)[0]["content"].encode()))
    ours = order.order(chains)
    blocks_max = 4 * largest_group(chains, ours)
    by_system = sorted(range(len(chains)), key=systems.__getitem__)
    orders = {"input order": range(len(chains)), "hash of system prompt": by_system, "batchwright": ours.positions}
    return {
        name: 100 * prefixes.cached_share([chains[at] for at in positions], blocks_max)
        for name, positions in orders.items()
    }


def largest_group(chains: list[bytes], ours: order.Order) -> int:
    members = defaultdict(list)
    for position, group in zip(ours.positions, ours.groups, strict=True):
        if group:
            members[group].append(chains[position])
    return max(map(prefixes.distinct, members.values()))


def split_microseconds(file: Path) -> float:
    """Processor time to read one line by offset and take its body out, as the dispatcher does."""
    with file.open("rb") as source:
        sample = [line for _, line in zip(range(5000), source, strict=False)]
    before = time.process_time()
    for line in sample:
        lines.split(line)
    return (time.process_time() - before) / len(sample) * 1e6


def goals(cases: dict[str, dict[str, float]], shares: dict[str, float]) -> list[report.Goal]:
    found = []
    for name, case in cases.items():
        found += [
            report.at_most(f"check and plan, {name}, clock", SECONDS_MAX, case["seconds"], " s"),
            report.at_most(f"check and plan, {name}, processor", SECONDS_MAX, case["processor_seconds"], " s"),
            report.at_most(f"memory above idle, {name}", MEGABYTES_MAX, case["megabytes_above_idle"], " MB"),
        ]
    return [*found, report.at_least("prefix cache, batchwright order", SHARE_MIN, shares["batchwright"], " %")]


def as_text(results: dict[str, Any]) -> str:
    file = results["file"]
    heading = f"{file['requests']:,} requests, {file['bytes']:,} bytes; entries of {planfile.ENTRY_BYTES} bytes"
    shares = [[name, f"{share:.1f} %"] for name, share in results["prefix_cache_percent"].items()]
    return "\n\n".join(
        [
            heading,
            report.goal_table([report.Goal(**goal) for goal in results["goals"]]),
            report.table(["order", "cached of possible"], shares),
            f"split a line into custom_id and body: {results['split_microseconds']:.1f} µs of processor time",
            f"calibration loop: {results['calibration_milliseconds']:.0f} ms; versions: {results['versions']}",
        ]
    )


if __name__ == "__main__":
    main()
