"""The event loop of long-running commands, and its garbage collector."""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Callable

_GC_THRESHOLDS = (50_000, 20, 100)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed; otherwise None, for the standard loop."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def spare_the_collector() -> None:
    """Exclude everything that is loaded by now from garbage collection, and collect less often from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
