"""What adapters of HTTP services share: the address, the key, and the meaning of errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from batchwright.errors import Transient
from batchwright.inference.http import Incoming, Response, Service
from batchwright.providers.contract import Adapter
from batchwright.providers.errors import ErrorTable, error_of, submit_once
from batchwright.providers.tools import AdapterTools


class HttpAdapter(Adapter):
    """A provider that is one HTTP service."""

    errors: ClassVar[ErrorTable]
    service: Service

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Make a free call and return its JSON."""
        return self.checked(await self.service.ask(method, path, **options))

    async def pay(self, path: str, **options: Any) -> Any:
        """Make the one call that costs money and return its JSON."""
        return await submit_once(self.errors, self.service.ask("POST", path, **options), now=time.time)

    @asynccontextmanager
    async def fetch(self, path: str, query: Mapping[str, str | int] | None = None) -> AsyncIterator[Incoming]:
        """Stream a file."""
        async with self.service.open("GET", path, query=query) as incoming:
            if not incoming.is_ok:
                raise error_of(self.errors, await incoming.whole(), now=time.time())
            yield incoming

    def checked(self, response: Response) -> Any:
        """The JSON of a response, an object or a list; raises the error if the response is one."""
        if not response.is_ok:
            raise error_of(self.errors, response, now=time.time())
        if not isinstance(answer := response.json(), (dict, list)):
            raise Transient("the provider's answer is neither an object nor a list", code="not_json")
        return answer


class KeyedAdapter(HttpAdapter):
    """A service with one key; its settings are `ServiceSettings`."""

    def __init__(self, settings: Any, tools: AdapterTools) -> None:
        super().__init__(settings, tools)
        self._secret = tools.secret(
            f"the key of {self.title}",
            file=settings.api_key_file,
            variable=settings.api_key_env if settings.api_key_file is None else None,
        )
        self.service = Service(tools.http, settings.base_url, self.headers, self.query())

    @property
    def key(self) -> str:
        return self._secret.text()

    def missing_credentials(self) -> str | None:
        return self._secret.missing

    async def headers(self) -> Mapping[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.key}"}

    def query(self) -> Mapping[str, str]:
        """Query parameters of every request."""
        return {}
