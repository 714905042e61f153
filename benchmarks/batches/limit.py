"""The adaptive limit compared with fixed ones, on three servers that show overload in different ways."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.batches.stage import MODEL, Ground, Stage, fixed, write_lines
from benchmarks.tools import report
from benchmarks.tools.workers import START_SECONDS

NAME = "limit"
TITLE = "Adaptive limit against fixed ones"
SECONDS_MAX = 420.0
FIXED = (5, 10, 20, 40, 80, 160, 320)
MOST = 320
RATE_MAX = 400
SHARE_MIN = 0.9
WASTE_MAX = 0.02
TIME_SCALE = 10
WINDOW = (60.0, 120.0)
FIXED_WINDOW = (4.0, 14.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A simulated server; `change` has the settings that its command line does not offer."""

    name: str
    arguments: Sequence[str]
    change: dict[str, float]


def backend(name: str, *arguments: str, **change: float) -> Backend:
    scale = ("--prefill", "0", "--cache-blocks", "0", "--time-scale", str(TIME_SCALE))
    return Backend(name=name, arguments=("--model", f"{MODEL}:fast", *scale, *arguments), change=change)


BACKENDS = (
    backend(
        "queues, 48 run", "--decode", "50", "--decode-total", "4000", "--max-running", "48", "--output-tokens", "100"
    ),
    backend(
        *("refuses with 429 beyond 64", "--decode", "40", "--decode-total", "0", "--max-running", "64"),
        *("--max-waiting", "0", "--output-tokens", "100", "--refuse-status", "429"),
        retry_after=1.0,
    ),
    backend(
        *("slows down, 503 beyond 40 + 8", "--decode", "60", "--decode-total", "1500", "--max-running", "40"),
        *("--max-waiting", "8", "--output-tokens", "100", "--refuse-status", "503"),
        retry_after=1.0,
    ),
)
SETTINGS = f"""
    Three simulators, {TIME_SCALE} times faster than real so that a round trip takes 0.1 to 0.5 s; lognormal lengths;
    refusals carry Retry-After 1 (in real seconds). One worker each, limit from 10 up to {MOST} by itself, against
    workers whose limit is set. Answers per second: adaptive in seconds {WINDOW[0]:g} to {WINDOW[1]:g} after the first
    request, as the goal says, in real time; fixed, which have nothing to learn, in seconds {FIXED_WINDOW[0]:g} to
    {FIXED_WINDOW[1]:g}. The fixed ones run one after the other while the adaptive one runs, on a simulator of their
    own. Refused is (429 + 503 + timeouts) ÷ requests in that window, and in brackets since the first request.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    found = await asyncio.gather(*(contest(ground, each) for each in BACKENDS))
    return {"backends": dict(zip((each.name for each in BACKENDS), found, strict=True))}


async def contest(ground: Ground, backend: Backend) -> dict[str, Any]:
    window = (20.0, 40.0) if ground.is_quick else WINDOW
    limits = (20, 80) if ground.is_quick else FIXED
    adaptive, others = await asyncio.gather(
        alone(ground, backend, {"inference_concurrency": MOST}, window), in_turn(ground, backend, limits)
    )
    rates = ", ".join(f"{limit}: {each['rate']:.0f}" for limit, each in others.items())
    ground.tell(f"  {backend.name}: {adaptive['rate']:.0f}/s; fixed {rates}")
    return {"adaptive": adaptive, "fixed": others}


async def in_turn(ground: Ground, backend: Backend, limits: Sequence[int]) -> dict[int, dict[str, float]]:
    window = (3.0, 8.0) if ground.is_quick else FIXED_WINDOW
    return {limit: await alone(ground, backend, fixed(limit), window) for limit in limits}


async def alone(
    ground: Ground, backend: Backend, settings: dict[str, int], window: tuple[float, float]
) -> dict[str, float]:
    count = int(window[1] * RATE_MAX)
    backoff = {"global_inference_gateway_initial_backoff": 0.1, "global_inference_gateway_max_backoff": 2.0}
    async with ground.stage(*backend.arguments, **settings, **backoff) as stage:
        file = write_lines(stage.folder / "limit.jsonl", count, line_bytes=300, max_tokens=None)
        if backend.change:
            stage.simulator.change(MODEL, **backend.change)
        async with stage.worker():
            return await watch(stage, (await stage.submit(file)).id, window)


async def watch(stage: Stage, id: str, window: tuple[float, float]) -> dict[str, float]:
    async with asyncio.timeout(START_SECONDS):
        while not (await stage.stats())["received"]:
            await stage.until(id, lambda batch: not batch.has_ended, START_SECONDS)
            await asyncio.sleep(0.02)
    began = time.monotonic()
    first = await stats_at(stage, began + window[0])
    last = await stats_at(stage, began + window[1])
    if (await stage.get(id)).has_ended:
        raise RuntimeError(f"the batch {id} ended before the window did")
    received = last["received"] - first["received"]
    return {
        "rate": (answers(last, "200") - answers(first, "200")) / (last["seconds"] - first["seconds"]),
        "refused": (refusals(last) - refusals(first)) / max(1, received),
        "refused_of_all": refusals(last) / last["received"],
        "in_flight": last["in_flight"],
        "seconds_p50": last["models"][MODEL]["total_seconds"]["p50"] / TIME_SCALE,
    }


async def stats_at(stage: Stage, moment: float) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
    return await stage.stats()


def refusals(stats: dict[str, Any]) -> int:
    """Requests time out after five minutes, longer than a run: they would show as aborted."""
    return answers(stats, "429") + answers(stats, "503") + int(stats["aborted"]["total"])


def answers(stats: dict[str, Any], status: str) -> int:
    return int(stats["answered"].get(status, 0))


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    found = figures["backends"] if figures else {}
    wanted = []
    for name in (backend.name for backend in BACKENDS):
        one = found.get(name)
        share = one["adaptive"]["rate"] / best(one) if one else None
        wanted.append(report.at_least(f"adaptive ÷ best fixed, {name}", SHARE_MIN, share))
        wanted.append(report.at_most(f"adaptive, refused, {name}", WASTE_MAX, one and one["adaptive"]["refused"]))
    return wanted


def best(one: dict[str, Any]) -> float:
    return float(max(each["rate"] for each in one["fixed"].values()))


def tables(figures: dict[str, Any]) -> str:
    found = figures["backends"]
    limits = list(next(iter(found.values()))["fixed"])
    rows = []
    for name, one in found.items():
        ours, fixed_rates = one["adaptive"], [report.number(one["fixed"][limit]["rate"]) for limit in limits]
        rows.append([name, *fixed_rates, report.number(ours["rate"]), f"{100 * ours['rate'] / best(one):.0f} %"])
        waste = [f"{100 * one['fixed'][limit]['refused']:.1f} %" for limit in limits]
        rows.append(["  refused", *waste, f"{100 * ours['refused']:.1f} %", f"({100 * ours['refused_of_all']:.1f} %)"])
        took = [f"{one['fixed'][limit]['seconds_p50']:.2f} s" for limit in limits]
        rows.append(["  round trip p50", *took, f"{ours['seconds_p50']:.2f} s", ""])
    return report.table(["answers/s, limit", *map(str, limits), "adaptive", "of the best"], rows)
