"""Killed half way and started again: the work that is done twice, compared with LlamaIndex's IngestionPipeline."""

import asyncio
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.documents.corpus import write_texts
from benchmarks.documents.stage import MODEL, ROOT, Provider, check, provider, stage
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "resume"
TITLE = "Killed half way and started again, beside LlamaIndex"
SECONDS_MAX = 900.0
CHARACTERS = 24_000
DELAY_SECONDS = 0.05
LEASE_SECONDS = 3.0
BATCH = 100
EVERY = 10
KILL_AT = 0.45
SETTINGS = f"""
    The same text files of {CHARACTERS:,} characters, chunks of at most 1,500 characters that repeat at most 150, and
    the same provider in a process of its own, which takes {DELAY_SECONDS * 1000:g} ms for a request and keeps a bill.
    Each contestant first runs to its end; then, over a fresh store, it gets SIGKILL when {KILL_AT:.0%} of these texts
    are on the bill, and is started again. Embedded again are texts on the bill before and after the kill; in flight
    were those of requests that had begun and whose answers were not kept yet; read again are documents that were
    extracted before the kill and after it; lost are chunks that were paid for and are not in the index at the end.
    Batchwright: one worker process, a lease of {LEASE_SECONDS:g} s, which is part of its seconds. LlamaIndex:
    SimpleDirectoryReader, SentenceSplitter counting characters, document store, cache and SimpleVectorStore, persisted
    at the end as its documentation shows, or after every {EVERY} documents; 100 texts in a request, one request after
    the other. It is killed between two persists: one that is cut off leaves files that cannot be read.
"""
IN_FLIGHT = "SELECT coalesce(sum(inputs), 0) FROM batchwright.ingest_call"
Contestant = Callable[[Ground, Path, int | None], Awaitable[dict[str, Any]]]


async def measure(ground: Ground) -> dict[str, Any]:
    papers = ground.folder / "resume"
    await asyncio.to_thread(write_texts, papers, ground.pick(80, 15), CHARACTERS)
    figures: dict[str, Any] = {"documents": ground.pick(80, 15), "contestants": {}}
    for name, contestant in contestants().items():
        whole = await contestant(ground, papers, None)
        killed = await contestant(ground, papers, round(whole["calls"] * KILL_AT))
        figures["contestants"][name] = {"whole": whole, "killed": killed}
        ground.tell(f"  {name}: {killed}")
    figures["llama_index"] = llama_index_version()
    return figures


def contestants() -> dict[str, Contestant]:
    found: dict[str, Contestant] = {"batchwright": batchwright}
    if importlib.util.find_spec("llama_index") is not None:
        found["llamaindex, persisted at the end"] = lambda *given: llamaindex(*given, every=0)
        found[f"llamaindex, persisted every {EVERY}"] = lambda *given: llamaindex(*given, every=EVERY)
    return found


def llama_index_version() -> str:
    if importlib.util.find_spec("llama_index") is None:
        return "unavailable: llama-index-core is not installed here; use make bench-ingest"
    return importlib.metadata.version("llama-index-core")


async def batchwright(ground: Ground, papers: Path, kill_at: int | None) -> dict[str, Any]:
    settings = {"ingest_embedding_model": MODEL, "ingest_lane": "realtime", "engine_lease_seconds": LEASE_SECONDS}
    async with (
        provider(delay_seconds=DELAY_SECONDS) as server,
        stage(ground, gateway_url=server.url, **settings) as on,
    ):
        began, before, in_flight = time.monotonic(), [], 0
        id = await on.submit(papers)
        if kill_at is not None:
            async with on.worker() as worker:
                await billed(server, kill_at)
                worker.kill()
                before = await settled_bill(server)
                ((in_flight,),) = await on.sql(IN_FLIGHT)
        async with on.worker():
            run = check(await on.until(id, lambda run: run.has_ended, 300))
        seconds = time.monotonic() - began
        read_again = (await on.steps(run))["extractions"] - run.item_count_done
        found = await accounts(server, before, await on.chunks(), seconds, read_again)
        return {**found, "in_flight": int(in_flight)}


async def llamaindex(ground: Ground, papers: Path, kill_at: int | None, *, every: int) -> dict[str, Any]:
    storage = ground.folder / f"llamaindex-{every}-{kill_at}"
    async with provider(delay_seconds=DELAY_SECONDS) as server:
        began, before, read_before = time.monotonic(), [], set()
        if kill_at is not None:
            process = await start_llamaindex(papers, storage, server.url, every)
            await billed(server, kill_at)
            process.kill()
            output, _ = await process.communicate()
            read_before = set(output.decode().split())
            before = await settled_bill(server)
        process = await start_llamaindex(papers, storage, server.url, every)
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"LlamaIndex ended with {process.returncode}: {output[-600:]!r}")
        *names, last = output.decode().splitlines()
        said = json.loads(last)
        again = len(read_before & set(names))
        found = await accounts(server, before, said["stored"], time.monotonic() - began, again)
        return {**found, "is_damaged": said["is_damaged"], "in_flight": BATCH if before else 0}


async def start_llamaindex(papers: Path, storage: Path, url: str, every: int) -> asyncio.subprocess.Process:
    command = ("--papers", str(papers), "--storage", str(storage), "--url", url, "--every", str(every))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.peers.llamaindex", *command), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )


async def billed(server: Provider, count: int) -> None:
    async with asyncio.timeout(240):
        while len(await server.texts()) < count:
            await asyncio.sleep(0.03)


async def settled_bill(server: Provider) -> list[str]:
    """Requests in flight when the process was killed were paid for as well."""
    await asyncio.sleep(5 * DELAY_SECONDS)
    return await server.texts()


async def accounts(server: Provider, before: list[str], stored: int, seconds: float, read_again: int) -> dict[str, Any]:
    texts = await server.texts()
    after = texts[len(before) :]
    return {
        "calls": len(texts),
        "calls_before_kill": len(before),
        "embedded_again": sum(text in set(before) for text in set(after)),
        "lost": max(0, len(set(texts)) - stored),
        "read_again": read_again,
        "seconds": seconds,
    }


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    ours = figures["contestants"]["batchwright"]["killed"] if figures else {}
    beyond = max(0, ours["embedded_again"] - ours["in_flight"]) if ours else None
    return [
        report.at_most("killed half way: chunks lost", 0, ours.get("lost")),
        report.at_most("killed half way: documents extracted again", 0, ours.get("read_again")),
        report.at_most("killed half way: texts embedded again beyond those in flight", 0, beyond),
    ]


def tables(figures: dict[str, Any]) -> str:
    columns = ("calls", "calls_before_kill", "embedded_again", "in_flight", "read_again", "lost")
    rows = []
    for name, one in figures["contestants"].items():
        counts = [f"{one['killed'][column]:,}" for column in columns]
        times = [f"{one[how]['seconds']:.1f}" for how in ("whole", "killed")]
        rows.append([name, *counts, *times])
    headings = ["", "texts embedded", "before the kill", "of these again", "in flight", "documents read again", "lost"]
    shown = report.table([*headings, "s without kill", "s with it"], rows)
    return f"{shown}\n\n{figures['documents']} documents; llama-index-core {figures['llama_index']}"
