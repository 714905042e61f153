"""A real browser that looks at pages: errors of its console and requests to other hosts fail the test."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.async_api import Browser, BrowserContext, Page, Request, async_playwright

from tests.conftest import skip

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
DROP = """([target, name, text]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([text], name, {type: "application/jsonl"}));
  document.querySelector(target).dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
}"""


class Browsing:
    """A browser, and the errors that it reported."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url
        self.troubles: list[str] = []

    async def page(self, **options: Any) -> Page:
        context: BrowserContext = await self.browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(15_000)
        page = await context.new_page()
        page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("request", self._note)
        return page

    def forgive(self, status: int) -> None:
        """Expect a page with this status, which the browser reports as an error."""
        (said,) = self.troubles
        assert f"a status of {status}" in said
        self.troubles.clear()

    def _note(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.troubles.append(f"a request to {request.url}")


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Browsing]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        skip("there is no chromium here; install it: apt install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            one = Browsing(browser, url)
            yield one
            assert one.troubles == []
        finally:
            await browser.close()


async def drop(page: Page, name: str, text: str) -> None:
    """Drop a file on the drop area."""
    await page.evaluate(DROP, ["[data-drop]", name, text])


async def check_access(page: Page) -> None:
    """Check that the page violates no accessibility rule and is not wider than the screen of a phone."""
    await page.evaluate(AXE)
    found = await page.evaluate("rules => axe.run(document, rules)", RULES)
    words = [f"{one['id']}: {[node['html'] for node in one['nodes']][:3]}" for one in found["violations"]]
    assert words == [], page.url
    await page.set_viewport_size({"width": 390, "height": 900})
    wide = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{page.url} is wider than a phone"
    await page.set_viewport_size({"width": 1280, "height": 900})
