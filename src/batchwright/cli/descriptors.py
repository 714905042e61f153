"""The number of files that a program may open: every connection of a client, a database or a model server is one."""

from __future__ import annotations

import resource

_ENOUGH = 65_536
"""No more than that: where there is no hard limit, programs that we start may look at every possible descriptor."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit, often 1,024, to the hard one; answers what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
