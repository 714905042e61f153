"""A dashboard that is called in-process, by visitors with separate sessions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from html import escape, unescape
from typing import Any

import httpx
import pytest

from batchwright.access.keys import Scope
from tests.api.conftest import Api, serving
from tests.web.browser import stage

__all__ = ["stage"]

HTML = {"Accept": "text/html"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run all tests with the browser in one process, so that there is only one browser."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if "stage" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group("browser"))


class Visitor:
    """A browser without JavaScript: it keeps cookies, and sends the forms of pages."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.http = client

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.http.get(path, params=params or None, headers=HTML)

    async def page(self, path: str, **params: Any) -> str:
        answer = await self.get(path, **params)
        assert answer.status_code == 200, (answer.status_code, answer.text[:2000])
        return answer.text

    async def token(self, path: str = "/ui/sign-in") -> str:
        return token_in((await self.get(path)).text)

    async def post(self, path: str, token: str | None = None, **fields: Any) -> httpx.Response:
        """Send a form with the token of the page that this browser has loaded."""
        token = await self.token("/ui/inbox") if token is None else token
        return await self.http.post(path, data={"csrf": token, **fields}, headers=HTML)

    async def post_twice(self, path: str, action: str, **fields: Any) -> list[httpx.Response]:
        """The form with this action on this page, sent by a double click: both requests have all its fields."""
        data = {**form_in(await self.page(path), action), **fields}
        posts = (self.http.post(action, data=data, headers=HTML) for _ in range(2))
        return list(await asyncio.gather(*posts))

    async def sign_in(self, secret: str, next: str = "/ui") -> httpx.Response:
        return await self.post("/ui/sign-in", await self.token(), key=secret, next=next)


def token_in(page: str) -> str:
    found = re.search(r'<meta name="csrf" content="([0-9a-f]{64})">', page)
    assert found is not None, page[:500]
    return found[1]


def form_in(page: str, action: str) -> dict[str, str]:
    """The hidden fields of the form with this action."""
    found = re.search(
        rf'<form(?=[^>]*method="post")[^>]* action="{re.escape(escape(action))}".*?</form>', page, re.DOTALL
    )
    assert found is not None, action
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', found[0]))
    return {name: unescape(value) for name, value in fields.items()}


class Web:
    """A running dashboard and its services."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.batchwright = api.batchwright

    async def visitor(self, **headers: str) -> Visitor:
        return Visitor(await self.api.client(**headers))

    async def signed_in(self, *scopes: Scope | str, tenant: str = "default", **options: Any) -> Visitor:
        """A visitor with a new key, who has signed in."""
        made = await self.batchwright.keys.create("test", tenant=tenant, scopes=scopes or tuple(Scope), **options)
        visitor = await self.visitor()
        answer = await visitor.sign_in(made.secret)
        assert answer.status_code == 303, answer.text[:500]
        visitor.key = made  # type: ignore[attr-defined]
        return visitor


@pytest.fixture
async def web(database_url: str) -> AsyncIterator[Web]:
    async with serving(database_url) as api:
        yield Web(api)
