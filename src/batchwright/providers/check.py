"""What `batchwright check` looks at for providers: those that the configuration names, and those with credentials."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from batchwright.db.check import Finding, Level
from batchwright.errors import ConfigurationError, OperationError

if TYPE_CHECKING:
    from batchwright.providers.part import ProvidersPart

_SECONDS = 10.0


async def check_providers(part: ProvidersPart) -> list[Finding]:
    """Try each provider that is meant to be used, with a call that costs nothing."""
    directory = part.directory
    try:
        meant = [name for name in directory.names if name in part.providers or directory.missing(name) is None]
    except ConfigurationError as error:
        return [Finding("providers", Level.ERROR, str(error), "correct that: no task can be sent")]
    return list(await asyncio.gather(*(_try(part, name) for name in meant)))


async def _try(part: ProvidersPart, name: str) -> Finding:
    what = f"provider {name}"
    if (missing := part.directory.missing(name)) is not None:
        return Finding(what, Level.ERROR, missing, "set it, or take the provider out of the configuration")
    try:
        async with asyncio.timeout(_SECONDS):
            return Finding(what, Level.OK, await part.directory.get(name).check())
    except ConfigurationError as error:
        return Finding(what, Level.ERROR, str(error), "correct its table in the configuration")
    except TimeoutError:
        return Finding(what, Level.WARNING, f"no answer within {_SECONDS:g} seconds", "see whether it can be reached")
    except OperationError as error:
        return Finding(what, Level.WARNING, str(error), "tasks for it wait until that works")
