"""How much the order of requests saves on a server that caches the beginnings of prompts."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from batchwright.batches.plan import lines, order
from batchwright.simulator.bodies import read
from batchwright.simulator.prefix_cache import chain
from benchmarks.batches import cost
from benchmarks.batches.stage import ENDPOINT, MODEL, Ground, Stage, fixed
from benchmarks.tools import prefixes, report

NAME = "prefix"
TITLE = "Prefix cache of the server, cache 4 x the largest group"
SECONDS_MAX = 200.0
IN_FLIGHT = 32
LINE_BYTES = 4180
SHARE_MIN = 95
SYSTEMS = 3
SETTINGS = f"""
    {SYSTEMS} system prompts, documents under each, and about seven questions on each document, in random order. The
    simulator has a block cache with LRU (blocks of 16 tokens) that knows a prompt once it was read to its end, and
    counts by itself; answers have lognormal lengths. The share is cached ÷ (total - distinct) tokens of blocks. Each
    order is really sent with {IN_FLIGHT} requests in flight: ours by a worker, with leaders, the others by the bare
    loop.
"""


async def measure(ground: Ground) -> dict[str, Any]:
    workload = Workload(ground.pick(4_000, 2_000))
    blocks = 4 * workload.largest_group()
    simulator = ("--model", f"{MODEL}:fast", "--cache-blocks", str(blocks), "--time-scale", "3")
    found = {}
    async with ground.stage(*simulator, **fixed(IN_FLIGHT)) as stage:
        for name, positions in workload.orders().items():
            stage.simulator.reset()
            file = workload.write(stage.folder / "prefix.jsonl", positions)
            if name == "batchwright":
                async with stage.worker():
                    await stage.run(file)
            else:
                await send(stage, file, len(positions))
            found[name] = (await stage.stats())["models"][MODEL]["block_tokens"]
            ground.tell(f"  {name}: {100 * found[name]['cached_share']:.1f} %")
    return {"requests": len(workload.lines), "cache_blocks": blocks, "orders": found}


async def send(stage: Stage, file: Path, count: int) -> None:
    empty = stage.folder / "nothing.jsonl"
    empty.touch()
    await cost.theirs(stage, "bare", file, empty, count, connections=IN_FLIGHT)


class Workload:
    """The lines, all for one model, and the orders in which they can be sent."""

    def __init__(self, count: int) -> None:
        self.lines = [rename(line) for line in prefixes.requests(count, LINE_BYTES, systems_count=SYSTEMS)]
        check = lines.LineCheck(ENDPOINT).check
        self._prompts = []
        for number, line in enumerate(self.lines, 1):
            found = check(line, number)
            assert isinstance(found, lines.GoodLine)
            self._prompts.append(found.prompt)
        self._ours = order.order([order.chain(prompt) for prompt in self._prompts])

    def orders(self) -> dict[str, Sequence[int]]:
        """Batchwright gets the file as it is, and orders the requests itself."""
        systems = [xxhash.xxh32_intdigest(json.loads(prompt)[0]["content"].encode()) for prompt in self._prompts]
        everyone = range(len(self.lines))
        return {
            "input order": everyone,
            "hash of system prompt": sorted(everyone, key=systems.__getitem__),
            "batchwright": everyone,
        }

    def largest_group(self) -> int:
        """In blocks of the simulator."""
        members = defaultdict(set)
        for position, group in zip(self._ours.positions, self._ours.groups, strict=True):
            if group:
                _, _, body = lines.split(self.lines[position])
                members[group].update(chain(read(ENDPOINT, body).prompts[0]))
        return max(map(len, members.values()))

    def write(self, file: Path, positions: Sequence[int]) -> Path:
        file.write_bytes(b"".join(self.lines[position] + b"\n" for position in positions))
        return file


def rename(line: bytes) -> bytes:
    """For our model, and without a fixed length: answers of equal length would end in waves, which is unrealistic."""
    request = json.loads(line)
    request["body"]["model"] = MODEL
    del request["body"]["max_tokens"]
    return json.dumps(request).encode()


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    share = 100 * figures["orders"]["batchwright"]["cached_share"] if figures else None
    return [report.at_least("prefix cache, found of what could be, Batchwright", SHARE_MIN, share, " %")]


def tables(figures: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{found[key]:,}" for key in ("total", "distinct", "cached")), f"{100 * found['cached_share']:.1f} %"]
        for name, found in figures["orders"].items()
    ]
    headings = [f"order of {figures['requests']:,} requests, cache of {figures['cache_blocks']} blocks"]
    return report.table([*headings, "block tokens", "distinct", "cached", "of possible"], rows)
