"""The limit of open files: each connection to a client, a database or a model server counts as one."""

from __future__ import annotations

import resource

_ENOUGH = 65_536
"""Maximum for the new limit: programs that we start may loop over all possible descriptors."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit, often 1,024, to the hard one; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
