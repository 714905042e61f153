"""What the queue benchmark found: figures, ratios, goals, and how they are shown."""

import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import psutil

from benchmarks.tools.contest import Contestant, Run
from benchmarks.tools.measure import percentile
from benchmarks.tools.report import Goal, at_least, at_most, goal_table, note, number, table

OURS = "Batchwright"
FRESH, FINISHED_ROWS, PINNED = "fresh", "finished rows", "pinned xmin"

RATIO_GOALS = {"PgQueuer": 1.3, "Procrastinate": 2.0, "DBOS": 2.0, "Awa": 2.0}
CPU_US_MAX = 150
NOISE_RATIO_MAX = 1.5
RATE_MIN = 10_000
START_MS_P50, START_MS_P99 = 10, 50
STRAIN_RATIO_MIN = 0.7

Figure = Callable[[Run], float | None]


@dataclass(kw_only=True, slots=True)
class Results:
    contestants: list[Contestant]
    failures: list[tuple[str, str]] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    server: dict[str, str]
    strained: dict[tuple[str, str], list[Run]] = field(default_factory=dict)

    def available(self) -> list[Contestant]:
        return [contestant for contestant in self.contestants if not contestant.unavailable]

    def best_variant(self, contestant: Contestant, lower: Figure | None = None) -> str:
        """The settings with the highest median rate, or with the lowest of another figure; else the first."""
        figure = lower or slowness
        found = {}
        for variant in contestant.variants:
            runs = [run for run in self.runs if (run.name, run.variant) == (contestant.name, variant)]
            if (value := median(runs, figure)) is not None:
                found[variant] = value
        return min(found, key=lambda variant: found[variant], default=contestant.variants[0])

    def best_runs(self, name: str, lower: Figure | None = None) -> dict[int, Run]:
        """By round: the run with the best settings."""
        for contestant in self.available():
            if contestant.name == name:
                variant = self.best_variant(contestant, lower)
                return {run.round: run for run in self.runs if (run.name, run.variant) == (name, variant)}
        return {}


def goals_of(results: Results) -> Iterator[Goal]:
    ours = list(results.best_runs(OURS).values())
    jobs = max((run.jobs for run in ours), default=0)
    yield at_least(f"{OURS}: jobs/s over {jobs:,} jobs", RATE_MIN, median(ours, rate))
    yield at_most(f"{OURS}: CPU µs per job, PostgreSQL + Python", CPU_US_MAX, median(ours, cpu))
    # Each figure meets the settings with which the peer is best at that figure.
    for peer, bound in RATIO_GOALS.items():
        yield at_least(f"CPU per job, {peer} ÷ {OURS}", bound, ratio(results, peer, OURS, cpu, lower=cpu))
        yield at_least(f"jobs/s, {OURS} ÷ {peer}", bound, ratio(results, OURS, peer, rate))
    for condition in (FINISHED_ROWS, PINNED):
        yield at_least(
            f"{OURS}: jobs/s, {condition} ÷ fresh",
            STRAIN_RATIO_MIN,
            strain_ratio(results, OURS, condition, rate),
        )
    started = [seconds * 1000 for seconds in results.latencies.get(OURS, [])]
    yield at_most(f"{OURS}: start latency p50 ms", START_MS_P50, percentile(started, 50) if started else None)
    yield at_most(f"{OURS}: start latency p99 ms", START_MS_P99, percentile(started, 99) if started else None)


def ratio(results: Results, above: str, below: str, figure: Figure, lower: Figure | None = None) -> float | None:
    """Median of the ratios of each round; rounds in which the machine changed go, if others remain."""
    over, under = results.best_runs(above, lower), results.best_runs(below, lower)
    pairs = [(over[number], under[number]) for number in over.keys() & under.keys()]
    calm = [pair for pair in pairs if noise(pair) <= NOISE_RATIO_MAX]
    return median_ratio(calm or pairs, figure)


def strain_ratio(results: Results, name: str, condition: str, figure: Figure) -> float | None:
    fresh = {run.round: run for run in results.strained.get((name, FRESH), [])}
    strained = {run.round: run for run in results.strained.get((name, condition), [])}
    return median_ratio([(strained[key], fresh[key]) for key in strained.keys() & fresh.keys()], figure)


def median_ratio(pairs: list[tuple[Run, Run]], figure: Figure) -> float | None:
    figures = [(figure(over), figure(under)) for over, under in pairs]
    ratios = [over / under for over, under in figures if over is not None and under]
    return statistics.median(ratios) if ratios else None


def noise(runs: tuple[Run, ...]) -> float:
    loops = [loop for run in runs for loop in (run.calibration_before, run.calibration_after)]
    return max(loops) / min(loops)


def median(runs: list[Run], figure: Figure) -> float | None:
    figures = [value for run in runs if (value := figure(run)) is not None]
    return statistics.median(figures) if figures else None


def rate(run: Run) -> float:
    return run.rate


def slowness(run: Run) -> float:
    return 1 / run.rate


def cpu(run: Run) -> float | None:
    return run.cpu_us


def kept(results: Results) -> dict[str, float | None]:
    """What the capacity page needs: the settings with the highest rate."""
    ours = list(results.best_runs(OURS).values())
    fields = ("disk_bytes", "enqueue_postgres_us", "enqueue_python_us", "jobs", "postgres_us", "python_us", "rate")
    wal = median(ours, lambda run: run.enqueue_wal_bytes + run.wal_bytes)
    return {**{name: median(ours, attrgetter(name)) for name in fields}, "wal_bytes": wal}


def as_json(results: Results) -> dict[str, Any]:
    return {
        "benchmark": "queue",
        "contestants": [asdict(contestant) for contestant in results.contestants],
        "failures": [{"what": what, "reason": reason} for what, reason in results.failures],
        "goals": [goal.as_json() for goal in goals_of(results)],
        "machine": machine(),
        "noise": noise_note(results),
        "runs": [asdict(run) for run in results.runs],
        "server": results.server,
        "start_latency_ms": {
            name: {f"p{percent}": percentile(values, percent) * 1000 for percent in (50, 99)}
            for name, values in results.latencies.items()
        },
        "strained": [
            {"condition": condition, **asdict(run)} for (_, condition), runs in results.strained.items() for run in runs
        ],
    }


def machine() -> dict[str, str]:
    return {
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "processors": str(psutil.cpu_count()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def as_text(results: Results) -> str:
    parts = [
        ", ".join(f"{key} {value}" for key, value in {**machine(), **results.server}.items()),
        run_table(results),
        strain_table(results),
        latency_table(results),
        goal_table(list(goals_of(results))),
        noise_note(results),
        "\n".join(note(what, reason) for what, reason in results.failures),
        "\n".join(note(f"{each.name} {each.version}", each.settings) for each in results.available()),
    ]
    return "\n\n".join(part for part in parts if part)


def noise_note(results: Results) -> str:
    runs = (*results.runs, *(run for runs in results.strained.values() for run in runs))
    moved = noise(runs) if runs else 1.0
    if moved <= NOISE_RATIO_MAX:
        return ""
    return note("Noise", f"the calibration loop moved by {moved:.1f} x; trust CPU, not jobs/s or latency")


def run_table(results: Results) -> str:
    best = {
        mark: {run for each in results.available() for run in results.best_runs(each.name, lower).values()}
        for mark, lower in ((">", None), ("*", cpu))
    }
    headings = ["no-op, claim to done (best settings: > rate, * CPU)", "jobs", "jobs/s", "PG µs", "Python µs", "sum µs"]
    headings += ["WAL B", "enqueue/s", "its PG µs", "its Python µs", "loop ms before/after"]
    rows = [
        [
            f"{''.join(mark if run in runs else ' ' for mark, runs in best.items())} {run.name}, {run.variant}",
            f"{run.jobs:,}",
            *map(number, (run.rate, run.postgres_us, run.python_us, run.cpu_us, run.wal_bytes)),
            *map(number, (run.enqueue_rate, run.enqueue_postgres_us, run.enqueue_python_us)),
            f"{run.calibration_before:.0f}/{run.calibration_after:.0f}",
        ]
        for run in sorted(results.runs, key=lambda run: (run.round, -run.rate))
    ]
    return table(headings, rows) if rows else ""


def strain_table(results: Results) -> str:
    rows = []
    for (name, condition), runs in results.strained.items():
        figures = (median(runs, rate), median(runs, cpu))
        ratios = (strain_ratio(results, name, condition, figure) for figure in (rate, cpu))
        rows.append([f"{name}, {condition}", *map(number, figures), *map(number, ratios)])
    headings = ["under strain", "jobs/s", "sum µs", "jobs/s ÷ fresh", "µs ÷ fresh"]
    return table(headings, sorted(rows)) if rows else ""


def latency_table(results: Results) -> str:
    rows = [
        [
            name,
            str(len(values)),
            *(f"{percentile(values, percent) * 1000:.1f}" for percent in (50, 90, 99, 100)),
        ]
        for name, values in results.latencies.items()
    ]
    return (
        table(["start latency on idle workers, ms", "jobs", "p50", "p90", "p99", "max"], sorted(rows)) if rows else ""
    )
