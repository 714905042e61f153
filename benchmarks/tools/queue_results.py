"""The results of the queue benchmark: figures, ratios, goals, and tables."""

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
RIVAL = "PgQueuer"
"""The closest peer; it runs under strain as well."""
FRESH, FINISHED_ROWS, PINNED = "fresh", "finished rows", "pinned xmin"

RATIO_GOALS = {RIVAL: 1.3, "Procrastinate": 2.0, "DBOS": 2.0, "Awa": 2.0}
CPU_US_MAX = 150
FINALISTS_MAX = 2
MINUTES_MAX = 15
NEARLY = 0.9
NOISE_RATIO_MAX = 1.5
RATE_MIN = 10_000
START_MS_P50, START_MS_P99 = 10, 50
STRAIN_RATIO_MIN = 0.7

Figure = Callable[[Run], float | None]


@dataclass(kw_only=True, slots=True)
class Results:
    contestants: list[Contestant]
    failures: list[tuple[str, str]] = field(default_factory=list)
    heats: list[Run] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    seconds: float | None = None
    server: dict[str, str]
    strained: dict[tuple[str, str], list[Run]] = field(default_factory=dict)

    def available(self) -> list[Contestant]:
        return [contestant for contestant in self.contestants if not contestant.unavailable]

    def add(self, run: Run, condition: str) -> None:
        if condition == FRESH:
            self.runs.append(run)
        else:
            self.strained.setdefault((run.name, condition), []).append(run)

    def best_variant(self, contestant: Contestant, lower: Figure | None = None) -> str:
        """The settings with the highest median rate, or with the lowest of another figure; else the first."""
        found = figures_of(contestant, self.runs, lower or slowness) or figures_of(
            contestant, self.heats, lower or slowness
        )
        return min(found, key=lambda variant: found[variant], default=contestant.variants[0])

    def finalists(self, contestant: Contestant) -> list[str]:
        """The settings that go into the rounds: the fastest of the heats; for the rival, who is near, also another one.

        That is the one with the least CPU, or else the second fastest if it was nearly as fast.
        """
        by_rate = figures_of(contestant, self.heats, slowness)
        fastest = sorted(by_rate, key=lambda variant: by_rate[variant]) or [contestant.variants[0]]
        if contestant.name != RIVAL or not by_rate:
            return fastest[:1]
        by_cpu = figures_of(contestant, self.heats, cpu)
        thriftiest = min(by_cpu, key=lambda variant: by_cpu[variant], default=fastest[0])
        nearly = [variant for variant in fastest if by_rate[fastest[0]] >= NEARLY * by_rate[variant]]
        return list(dict.fromkeys([fastest[0], thriftiest, *nearly]))[:FINALISTS_MAX]

    def best_runs(self, name: str, lower: Figure | None = None) -> dict[int, Run]:
        """By round: the run with the best settings."""
        for contestant in self.available():
            if contestant.name == name:
                variant = self.best_variant(contestant, lower)
                return {run.round: run for run in self.runs if (run.name, run.variant) == (name, variant)}
        return {}


def figures_of(contestant: Contestant, runs: list[Run], figure: Figure) -> dict[str, float]:
    """The median of each of the contestant's settings that ran."""
    found = {
        variant: median([run for run in runs if (run.name, run.variant) == (contestant.name, variant)], figure)
        for variant in contestant.variants
    }
    return {variant: value for variant, value in found.items() if value is not None}


def goals_of(results: Results) -> Iterator[Goal]:
    ours = list(results.best_runs(OURS).values())
    jobs = max((run.jobs for run in ours), default=0)
    yield at_least(f"{OURS}: jobs/s over {jobs:,} jobs", RATE_MIN, median(ours, rate))
    yield at_most(f"{OURS}: CPU µs per job, PostgreSQL + Python", CPU_US_MAX, median(ours, cpu))
    # Each figure is compared with that of the settings with which the peer is best at it.
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
    yield at_most("minutes of this benchmark", MINUTES_MAX, None if results.seconds is None else results.seconds / 60)


def ratio(results: Results, above: str, below: str, figure: Figure, lower: Figure | None = None) -> float | None:
    """Median of the ratios of each round; rounds in which the machine changed go, if others remain."""
    over, under = results.best_runs(above, lower), results.best_runs(below, lower)
    pairs = [(over[number], under[number]) for number in over.keys() & under.keys()]
    calm = [pair for pair in pairs if noise(pair) <= NOISE_RATIO_MAX]
    return median_ratio(calm or pairs, figure)


def strain_ratio(results: Results, name: str, condition: str, figure: Figure) -> float | None:
    """Against the fresh run of the same round with the same settings."""
    fresh = {(run.round, run.variant): run for run in results.runs if run.name == name}
    strained = {(run.round, run.variant): run for run in results.strained.get((name, condition), [])}
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
        "heats": [asdict(run) for run in results.heats],
        "machine": machine(),
        "noise": noise_note(results),
        "runs": [asdict(run) for run in results.runs],
        "seconds": results.seconds,
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
        heat_table(results),
        strain_table(results),
        latency_table(results),
        goal_table(list(goals_of(results))),
        noise_note(results),
        "\n".join(note(what, reason) for what, reason in results.failures),
        "\n".join(
            note(f"{each.name} {each.version}", f"{each.settings} {share(results, each)}")
            for each in results.available()
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def share(results: Results, contestant: Contestant) -> str:
    """The parts of the benchmark that this contestant ran."""
    parts = {
        "in heats": [run for run in results.heats if run.name == contestant.name],
        "in rounds": [run for run in results.runs if run.name == contestant.name],
        "strained": [run for (name, _), runs in results.strained.items() for run in runs if name == contestant.name],
    }
    said = [f"{len(runs)} of {max(run.jobs for run in runs):,} jobs {what}" for what, runs in parts.items() if runs]
    if contestant.name in results.latencies:
        said.append(f"start latency of {len(results.latencies[contestant.name])} jobs")
    return f"Runs: {', '.join(said) or 'none'}."


def noise_note(results: Results) -> str:
    runs = (*results.heats, *results.runs, *(run for runs in results.strained.values() for run in runs))
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


def heat_table(results: Results) -> str:
    """Which settings went into the rounds."""
    finalists = {each.name: results.finalists(each) for each in results.available()}
    rows = [
        [
            f"{'>' if run.variant in finalists[run.name] else ' '} {run.name}, {run.variant}",
            f"{run.jobs:,}",
            *map(number, (run.rate, run.cpu_us)),
        ]
        for run in sorted(results.heats, key=lambda run: (run.name, -run.rate))
    ]
    return table(["heats (> goes into the rounds)", "jobs", "jobs/s", "sum µs"], rows) if rows else ""


def strain_table(results: Results) -> str:
    rows = []
    for (name, condition), runs in results.strained.items():
        figures = (median(runs, rate), median(runs, cpu))
        ratios = (strain_ratio(results, name, condition, figure) for figure in (rate, cpu))
        rows.append([f"{name}, {condition}", str(len(runs)), *map(number, figures), *map(number, ratios)])
    headings = ["under strain", "runs", "jobs/s", "sum µs", "jobs/s ÷ fresh", "µs ÷ fresh"]
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
