"""Every page of the dashboard over a million jobs, and 200 viewers at once."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fastapi.routing import APIRoute

from batchwright import AsyncBatchwright
from batchwright.api.server import ApiServer
from batchwright.db.database import Pool
from batchwright.settings import load_settings
from batchwright.web.live import Feed
from batchwright.web.site import Site
from benchmarks.fleet.idle import migrate
from benchmarks.fleet.lists import EVENTS, JOBS, ROOT, run
from benchmarks.tools import report
from benchmarks.tools.sections import Ground

NAME = "pages"
TITLE = "Pages of the dashboard, and people who look at them"
SECONDS_MAX = 900.0
BATCHES = 10_000
VIEWERS = 200
TIMES = 20
MILLISECONDS_MAX = 100.0
LOADS_MAX = 1.05
RATIO_MAX = 1.1
WATCH_SECONDS = 10.0
PAGE_BYTES_MAX = 100_000
ID = re.compile(r"\{(\w+)(?::\w+)?\}")
SETTINGS = f"""
    {JOBS:,} jobs with {EVENTS} events each, {BATCHES:,} batches of 11 tenants of which 100 run, as many tasks, a tenth
    as many runs over documents, and a week of figures. Each page is asked for {TIMES} times, and loaded anew each
    time; the time is that of the application, without the network. The {VIEWERS} viewers have four kinds of pages
    open for {WATCH_SECONDS:g} s; statements are those of the whole server process.
"""
JOB = str(ROOT)
RUNNING = f"batch_{BATCHES - 1:032x}"
QUERIES = {
    "/ui": ("", "?span=day", "?tenant=*"),
    "/ui/jobs": ("", "?status=FAILED", "?status=QUEUED", "?type=type_3", "?tenant=tenant_3", "?tenant=*"),
    "/ui/batches": ("", "?status=running", "?status=failed", "?tenant=tenant_3", "?tenant=*"),
    "/ui/search": ("?q=nothing",),
    "/ui/tasks": ("", "?status=open"),
    "/ui/documents": ("", "?status=open"),
}
LEFT_OUT = ("/ui/assets", "/ui/sign", "/ui/batches/new/", "/ui/documents/items/", "/ui/documents/collections/{name}/")
"""Not measured: assets, forms, and pages that need files or models that do not exist here."""
WATCHED = ("/ui", "/ui/jobs", "/ui/batches", f"/ui/batches/{RUNNING}")


class Counting:
    """A pool that counts the statements of pages."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.statements = 0

    async def rows(self, *args: Any, **options: Any) -> Any:
        self.statements += 1
        return await self._pool.rows(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


async def measure(ground: Ground) -> dict[str, Any]:
    jobs, events = ground.pick(JOBS, 20_000), ground.pick(EVENTS, 2)
    batches = ground.pick(BATCHES, 500)
    with ground.server.database() as url:
        await migrate(url)
        run(url, "history.sql", jobs=jobs, events=events)
        ground.tell("  jobs and events are loaded")
        run(url, "batches.sql", batches=batches)
        ground.tell("  batches are loaded")
        async with serving(url, ground.folder) as (server, pool):
            pages = await ask_all(server, batches, ground.pick(TIMES, 5))
            ground.tell("  every page was measured")
            viewers = await watch_all(server, pool, batches, ground)
    return {"pages": pages, "viewers": viewers}


@asynccontextmanager
async def serving(url: str, folder: Path) -> AsyncIterator[tuple[ApiServer, Counting]]:
    flags = {
        "database": {"url": url, "folder": str(folder)},
        "api": {"port": 0},
        "batches": {"prices": {"*": {"input": 1.0, "output": 2.0}}},
    }
    async with AsyncBatchwright(settings=load_settings(flags, environment={})) as client:
        pool = Counting(client.pool)
        client.use_pool(pool)  # type: ignore[arg-type]
        server = await client.server()
        try:
            yield server, pool
        finally:
            await server.close()


# Pages ------------------------------------------------------------------------------------------------------------


def addresses(server: ApiServer, batches: int) -> Iterator[str]:
    """The URLs of all registered pages, so that a new page is measured without a change here."""
    known = {"/ui/jobs": JOB, "/ui/batches": f"batch_{batches - 1:032x}", "/ui/tasks": f"task_{20:032x}"}
    known |= {"/ui/documents/runs": f"run_{20:032x}", "/ui/documents/collections": "papers"}
    for route in application(server).routes:
        if not isinstance(route, APIRoute) or "GET" not in route.methods or not route.path.startswith("/ui"):
            continue
        needs_more = any(param.field_info.is_required() for param in route.dependant.query_params)
        if route.path.startswith(LEFT_OUT) or re.search(r"/(download|lines|manifest)", route.path):
            continue
        if needs_more and route.path not in QUERIES:
            continue
        begin = route.path.partition("/{")[0]
        path = ID.sub(lambda _, begin=begin: known.get(begin, "unknown"), route.path, count=1)
        if "{" not in path and "unknown" not in path:
            yield from (path + query for query in QUERIES.get(path, ("",)))


async def ask_all(server: ApiServer, batches: int, times: int) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=application(server))
    found = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        for address in dict.fromkeys(addresses(server, batches)):
            found[address] = await ask(server, client, address, times)
    return found


async def ask(server: ApiServer, client: httpx.AsyncClient, address: str, times: int) -> dict[str, float]:
    """The first request is not counted: it compiles the templates."""
    taken, spent, size = list[float](), list[float](), 0
    for n in range(times + 1):
        site(server).live.forget()
        began, used = time.perf_counter(), time.process_time()
        answer = await client.get(address)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        assert answer.status_code in (200, 303), f"{address} answers {answer.status_code}: {answer.text[:500]}"
        size = len(answer.content)
        if n:
            taken.append(1000 * seconds)
            spent.append(1000 * used)
    taken.sort()
    spent.sort()
    p95 = taken[min(len(taken) - 1, round(0.95 * len(taken)))]
    middle = len(taken) // 2
    return {"median": round(taken[middle], 1), "p95": round(p95, 1), "cpu": round(spent[middle], 1), "bytes": size}


# Viewers ----------------------------------------------------------------------------------------------------------


async def watch_all(server: ApiServer, pool: Counting, batches: int, ground: Ground) -> dict[str, Any]:
    """The same pages with one viewer each, and with many."""
    watched = [path.replace(RUNNING, f"batch_{batches - 1:032x}") for path in WATCHED]
    server.start()
    seconds = WATCH_SECONDS if not ground.is_quick else 4.0
    few = await watch(server, pool, watched, 1, seconds)
    many = await watch(server, pool, watched, ground.pick(VIEWERS, 40) // len(watched), seconds)
    return {"kinds": len(watched), "one_each": few, "many": many}


async def watch(server: ApiServer, pool: Counting, paths: list[str], each: int, seconds: float) -> dict[str, float]:
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(follow(server.url, path)) for path in paths for _ in range(each)]
        while site(server).live.viewers < len(streams):
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)
        with counted_loads() as loads:
            statements, began = pool.statements, time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            found = {
                "viewers": float(site(server).live.viewers),
                "loads_per_second_and_kind": round(len(loads) / took / len(paths), 3),
                "statements_per_second": round((pool.statements - statements) / took, 1),
            }
        for stream in streams:
            stream.cancel()
    return found


async def follow(url: str, path: str) -> None:
    """An open page: reads its updates until cancelled."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nAccept: text/event-stream\r\n\r\n"
    try:
        writer.write(head.encode())
        status = await reader.readline()
        assert b" 200 " in status, status
        while await reader.read(65_536):
            pass
    finally:
        writer.close()


@contextmanager
def counted_loads() -> Iterator[list[Feed]]:
    """Each time that a page was loaded from the database."""
    loads: list[Feed] = []
    note = Feed.note

    def count(feed: Feed, value: Any, now: float) -> None:
        loads.append(feed)
        note(feed, value, now)

    Feed.note = count  # type: ignore[method-assign]
    try:
        yield loads
    finally:
        Feed.note = note  # type: ignore[method-assign]


def application(server: ApiServer) -> Any:
    return server._server.config.app


def site(server: ApiServer) -> Site:
    return next(one.services for one in server._services.served if isinstance(one.services, Site))


# ------------------------------------------------------------------------------------------------------------------


def goals(figures: dict[str, Any] | None) -> list[report.Goal]:
    pages, viewers = (figures or {}).get("pages", {}), (figures or {}).get("viewers", {})
    slowest = max((page["p95"] for page in pages.values()), default=None)
    largest = max((page["bytes"] for page in pages.values()), default=None)
    many, few = viewers.get("many", {}), viewers.get("one_each", {})
    ratio = many["statements_per_second"] / few["statements_per_second"] if few else None
    loads = many.get("loads_per_second_and_kind")
    return [
        report.at_most("slowest page, p95 of server time", MILLISECONDS_MAX, slowest, " ms"),
        report.at_most("largest page", PAGE_BYTES_MAX, largest, " bytes"),
        report.at_most(f"{VIEWERS} dashboards: loads per second and page kind", LOADS_MAX, loads),
        report.at_most(f"{VIEWERS} dashboards: statements, times those of one of each kind", RATIO_MAX, ratio),
    ]


def tables(figures: dict[str, Any]) -> str:
    rows = [
        [address, *(f"{page[name]:.1f}" for name in ("median", "p95", "cpu")), f"{page['bytes'] / 1000:.1f}"]
        for address, page in sorted(figures["pages"].items(), key=lambda one: -one[1]["p95"])
    ]
    viewers = [
        [
            f"{one['viewers']:.0f} viewers",
            f"{one['loads_per_second_and_kind']:.2f}",
            f"{one['statements_per_second']:.1f}",
        ]
        for one in (figures["viewers"]["one_each"], figures["viewers"]["many"])
    ]
    pages = report.table(["page", "median ms", "p95 ms", "CPU ms", "kB"], rows)
    return f"{pages}\n\n{report.table(['viewers', 'loads/s and kind', 'statements/s'], viewers)}"
