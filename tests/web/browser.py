"""One dashboard with a worker, and one real browser, for all tests that look at it.

Everything lives in one event loop for the whole session. A page that writes an error to its console, or asks another
host for anything, fails its test.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from batchwright import AsyncBatchwright, Context, Done, NewJob, Wait, operation
from batchwright.access.keys import Created, Scope
from batchwright.access.settings import ApiSettings
from batchwright.errors import Fatal
from batchwright.web.settings import WebSettings
from tests.api.conftest import configured
from tests.conftest import database, skip

LOOP = pytest.mark.asyncio(loop_scope="session")


@operation("greet")
async def greet(name: str, times: int = 1) -> str:
    """Greet a person."""
    return f"Hello, {name}!" * times


class Printer:
    """Whether invoices can be printed; tests repair it."""

    is_broken = True


@operation("invoice.send", max_attempts=1)
async def send_invoice(ctx: Context, number: int) -> str:
    """Send an invoice."""
    ctx.emit("invoice.rendered", message="the document is ready", pages=2)
    if Printer.is_broken:
        raise Fatal("the printer has no paper", code="no_paper")
    return "sent"


@operation("crash", max_attempts=1)
async def crash() -> None:
    """Fail with an unexpected error."""
    raise ValueError("a surprise")


@operation("report.page")
async def report_page(number: int) -> int:
    return number


@operation("report.build")
async def build_report(pages: int = 6) -> Wait:
    """Build a report of many pages."""
    return Wait([NewJob("report.page", {"number": n}) for n in range(pages)])


@operation("month.close")
async def close_month() -> Done:
    """Close the month, then build its report."""
    return Done("closed", then=[NewJob("report.build", {"pages": 6})])


@operation("year.review")
async def review_year(reports: int = 3) -> Wait:
    """Build several reports."""
    return Wait([NewJob("report.build", {"pages": 2}) for _ in range(reports)])


OPERATIONS = [greet, send_invoice, crash, report_page, build_report, close_month, review_year]


class Stage:
    """A dashboard, its worker, and a browser."""

    def __init__(self, batchwright: AsyncBatchwright, url: str, browser: Browser) -> None:
        self.batchwright = batchwright
        self.url = url
        self._browser = browser
        self.admin: Created | None = None

    @asynccontextmanager
    async def page(self, secret: str | None = None, *, errors: int = 0, **options: Any) -> AsyncIterator[Page]:
        """A page in a new browser profile, signed in with this key; the test fails if it reports more errors."""
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = await self._browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(15_000)
        troubles: list[str] = []
        host = urlsplit(self.url).netloc
        context.on(
            "console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None
        )
        context.on("weberror", lambda error: troubles.append(str(error.error)))
        context.on(
            "request", lambda one: troubles.append(one.url) if urlsplit(one.url).netloc not in (host, "") else None
        )
        try:
            page = await context.new_page()
            if secret is not None:
                await self.sign_in(page, secret)
            yield page
        finally:
            await context.close()
        assert len(troubles) == errors, troubles

    async def sign_in(self, page: Page, secret: str) -> None:
        await page.goto("/ui/sign-in")
        await page.get_by_label("API key").fill(secret)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url("**/ui")

    @asynccontextmanager
    async def admin_page(self, **options: Any) -> AsyncIterator[Page]:
        assert self.admin is not None
        async with self.page(self.admin.secret, **options) as page:
            yield page

    async def key(self, *scopes: Scope, tenant: str = "default") -> Created:
        return await self.batchwright.keys.create("visitor", tenant=tenant, scopes=scopes or tuple(Scope))

    async def submit(self, job_type: str, payload: Any = None, **options: Any) -> str:
        return str(await self.batchwright.enqueue(job_type, payload, **options))

    async def ended(self, *ids: str) -> None:
        for id in ids:
            await self.batchwright.wait(id, timeout=30)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(server: str, template: str) -> AsyncIterator[Stage]:
    """The stage, which is started once; tests add the data that they need."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        skip("there is no Chromium here; install it with: apt-get install chromium")
    async with AsyncExitStack() as stack:
        name = f"batchwright_browser_{uuid.uuid4().hex[:12]}"
        url = stack.enter_context(database(server, name, template))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchwright-web-")))
        web = WebSettings(refresh_seconds=0.2, sign_ins_per_minute=1000)
        settings = configured(url, folder, api=ApiSettings(port=0), web=web)
        batchwright = await stack.enter_async_context(AsyncBatchwright(settings=settings, operations=OPERATIONS))
        server_ = await batchwright.server()
        server_.start()
        stack.push_async_callback(server_.close)
        await stack.enter_async_context(working(batchwright))
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.push_async_callback(browser.close)
        stage = Stage(batchwright, server_.url, browser)
        stage.admin = await stage.key()
        yield stage


@asynccontextmanager
async def working(batchwright: AsyncBatchwright) -> AsyncIterator[None]:
    import asyncio

    worker = batchwright.worker()
    running = asyncio.create_task(worker.run())
    while not await batchwright.catalog.is_published("greet"):
        await asyncio.sleep(0.02)
    try:
        yield
    finally:
        worker.stop()
        await running
