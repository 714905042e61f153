"""Take pictures of the dashboard for the docs, light and dark, while `batchwright demo` runs.

`make screenshots` writes them into docs/images. They show real jobs and a real batch of the demo.
"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, Page, async_playwright

IMAGES = Path(__file__).parent / "images"
BYTES_MAX = 200 * 1024
REQUESTS = 12_000
OPERATION = "compute_embeddings"
WIDTH, HEIGHT = 1280, 860
_START_SECONDS = 300.0
_BATCH_SECONDS = 300.0
_ADDRESS = re.compile(r"watch it in a browser: (http://\S+)/ui")
_SCHEMES = ("light", "dark")


async def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here; install it with: apt-get install chromium")
    await asyncio.to_thread(IMAGES.mkdir, exist_ok=True)
    async with demo() as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            paths = await furnish(http)
            for name, path in paths.items():
                if (await http.get(path, headers={"Accept": "text/html"})).status_code != 200:
                    say(f"{name}: there is no page {path} here, so there is no picture of it")
                    continue
                for scheme in _SCHEMES:
                    await take(browser, url + path, scheme, IMAGES / f"{name}-{scheme}.webp")
        await browser.close()


@asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Run a demo until the pictures are taken, and yield its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batchwright", "demo", "--keep", "--requests", str(REQUESTS)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            async for line in process.stdout:
                if found := _ADDRESS.search(line.decode()):
                    break
            else:
                sys.exit("the demo ended before it said where its dashboard is")
        reading = asyncio.create_task(process.stdout.read())
        yield found[1]
        reading.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def furnish(http: httpx.AsyncClient) -> dict[str, str]:
    """Create jobs that succeed, fail and wait, beside the batch of the demo; return the pages for the pictures."""
    await until(lambda: knows(http, OPERATION), "the demo's workers have published no operation")
    for n in range(12):  # tables that do not exist, so that the inbox is not empty
        await submit(http, n % 3)
    await submit(http, 0, delay_seconds=3600)
    plan = {"name": "nightly-embeddings", "cron": "0 2 * * *", "timezone": "Europe/Berlin"}
    await http.post("/v1/schedules", json={**plan, "job": job_of(0)})
    await until(lambda: half_done(http), "the demo's batch did not get half way")
    batch = (await http.get("/v1/batches", params={"limit": 1})).json()["data"][0]["id"]
    failed = (await http.get("/v1/jobs", params={"status": "FAILED", "limit": 1})).json()["data"]
    process = (await http.get("/v1/jobs", params={"job_type": "batch.process", "limit": 1})).json()["data"]
    return {
        "overview": "/ui",
        "batches": "/ui/batches",
        "batch": f"/ui/batches/{batch}",
        "jobs": "/ui/jobs",
        "job": f"/ui/jobs/{process[0]['id']}" if process else "/ui/jobs",
        "failed-job": f"/ui/jobs/{failed[0]['id']}" if failed else "/ui/jobs",
        "inbox": "/ui/inbox",
        "operations": "/ui/operations",
    }


def job_of(table: int) -> dict[str, Any]:
    source = {"table": f"archive_{2024 + table}", "id": "id", "text": "body"}
    return {"job_type": OPERATION, "payload": {"source": source}}


async def submit(http: httpx.AsyncClient, table: int, **options: Any) -> None:
    (await http.post("/v1/jobs", json={**job_of(table), **options})).raise_for_status()


async def knows(http: httpx.AsyncClient, name: str) -> bool:
    return any(one["name"] == name for one in (await http.get("/v1/operations")).json()["data"])


async def half_done(http: httpx.AsyncClient) -> bool:
    found = (await http.get("/v1/batches", params={"limit": 1})).json()["data"]
    counts = found[0]["request_counts"] if found else {"completed": 0}
    return int(counts["completed"]) >= REQUESTS // 2


async def until(check: Any, otherwise: str) -> None:
    ends_at = time.monotonic() + _BATCH_SECONDS
    while not await check():
        if time.monotonic() > ends_at:
            sys.exit(otherwise)
        await asyncio.sleep(0.2)


async def take(browser: Browser, url: str, scheme: Any, file: Path) -> None:
    context = await browser.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
    page = await context.new_page()
    await page.goto(url)
    await page.locator("#live-state").wait_for(state="visible")
    picture = await capture(page)
    await context.close()
    if len(picture) > BYTES_MAX:
        sys.exit(f"{file.name} has {len(picture):,} bytes, more than {BYTES_MAX:,}")
    await asyncio.to_thread(file.write_bytes, picture)
    say(f"{file.name}: {len(picture):,} bytes")


async def capture(page: Page) -> bytes:
    session = await page.context.new_cdp_session(page)
    answer = await session.send("Page.captureScreenshot", {"format": "webp", "quality": 82})
    return base64.b64decode(answer["data"])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
