"""What `batchwright check` looks at for providers: those that the configuration names, and those with credentials."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchwright.db.check import Finding, Level
from batchwright.errors import ConfigurationError, InvalidInput, OperationError

if TYPE_CHECKING:
    from batchwright.providers.part import ProvidersPart

_SECONDS = 10.0


async def check_providers(part: ProvidersPart) -> list[Finding]:
    """Try each provider that is meant to be used, with a call that costs nothing."""
    directory = part.directory
    try:
        meant = [
            name
            for name in directory.names
            if name in part.providers or directory.get(name).missing_credentials() is None
        ]
    except (ConfigurationError, InvalidInput) as error:
        return [Finding("providers", Level.ERROR, str(error), "correct that: no task can be sent")]
    if not meant:
        return []
    return list(await asyncio.gather(*(_try(part, name) for name in meant)))


async def _try(part: ProvidersPart, name: str) -> Finding:
    what = f"provider {name}"
    try:
        adapter = part.directory.get(name)
        if (missing := adapter.missing_credentials()) is not None:
            return Finding(what, Level.ERROR, missing, "set it, or take the provider out of the configuration")
        async with asyncio.timeout(_SECONDS):
            return Finding(what, Level.OK, await adapter.check())
    except (ConfigurationError, InvalidInput) as error:
        return Finding(what, Level.ERROR, str(error), "correct its table in the configuration")
    except TimeoutError:
        return Finding(what, Level.WARNING, f"no answer within {_SECONDS:g} seconds", "see whether it can be reached")
    except OperationError as error:
        return Finding(what, Level.WARNING, str(error), "tasks for it wait until that works")
