"""The `batchwright check` of providers: those that the configuration names, and those that have credentials."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchwright.db.check import Finding, Level
from batchwright.errors import ConfigurationError, Fatal, OperationError

if TYPE_CHECKING:
    from batchwright.providers.part import ProvidersPart

_SECONDS = 10.0
_REFUSED = "replace it, or check its permissions and balance at the provider; tasks for it wait until it is accepted"
_UNREACHABLE = "check that this machine can reach it; tasks for it wait until then"


async def check_providers(part: ProvidersPart) -> list[Finding]:
    """Try each configured provider with a free call."""
    directory = part.directory
    try:
        meant = [name for name in directory.names if name in part.providers or directory.missing(name) is None]
    except ConfigurationError as error:
        return [
            Finding("providers", Level.ERROR, str(error), "correct the configuration: until then no task can be sent")
        ]
    return list(await asyncio.gather(*(_try(part, name) for name in meant)))


async def _try(part: ProvidersPart, name: str) -> Finding:
    what = f"provider {name}"
    try:
        adapter = part.directory.get(name)
        if (missing := adapter.missing_credentials()) is not None:
            return Finding(what, Level.ERROR, missing, "set it, or remove the provider from the configuration")
        async with asyncio.timeout(_SECONDS):
            return Finding(what, Level.OK, await adapter.check())
    except ConfigurationError as error:
        return Finding(what, Level.ERROR, str(error), f"correct [providers.{name}] in the configuration")
    except TimeoutError:
        return Finding(what, Level.WARNING, f"no answer within {_SECONDS:g} seconds", _UNREACHABLE)
    except Fatal as error:
        if error.scope == "credential":
            return Finding(what, Level.ERROR, f"its credential is refused: {error}", _REFUSED)
        return Finding(what, Level.ERROR, str(error), f"correct [providers.{name}] in the configuration")
    except OperationError as error:
        return Finding(what, Level.WARNING, str(error), _UNREACHABLE)
