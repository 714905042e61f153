"""The findings of `batchwright check` about who can use the HTTP server."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from batchwright.access.settings import ApiSettings
from batchwright.db.check import Finding, Level

_FIRST_UID = 1000
"""The first user id of people; lower ids are system users."""
_NOBODY_UID = 65534
_SESSIONS = Path("/run/user")
_NAMES_SHOWN = 3


def check_access(settings: ApiSettings, *, has_key: bool, others: Iterable[str] | None = None) -> Finding:
    """Without a key a loopback address is open to every user of the machine; `others` are the other users found."""
    if settings.socket is not None:
        return Finding("http", Level.OK, f"on the unix socket {settings.socket}; only the server's user can connect")
    where = f"{settings.host}:{settings.port}"
    if has_key:
        return Finding("http", Level.OK, f"on {where}; it needs a key")
    if not settings.is_loopback:
        text = f"on {where}, which needs a key, and there is none: the server does not start"
        return Finding("http", Level.WARNING, text, "create one: batchwright key create NAME")
    names = list(find_other_users() if others is None else others)
    if not names:
        return Finding("http", Level.OK, f"on {where}; without a key it is open to every user of this machine")
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
    text = f"on {where}; without a key it is open to every user of this machine, such as {shown}"
    return Finding("http", Level.WARNING, text, "create a key (batchwright key create NAME), or set api.socket")


def find_other_users(
    entries: Iterable[pwd.struct_passwd] | None = None, sessions: Path = _SESSIONS, uid: int | None = None
) -> list[str]:
    """People other than this process's user who have a home here or are logged in; names in the order of their ids."""
    own = os.geteuid() if uid is None else uid
    active = _logged_in(sessions)
    found = []
    for entry in sorted(pwd.getpwall() if entries is None else entries, key=lambda entry: entry.pw_uid):
        is_person = entry.pw_uid >= _FIRST_UID and entry.pw_uid != _NOBODY_UID
        if entry.pw_uid != own and (entry.pw_uid in active or (is_person and _has_home(entry))):
            found.append(entry.pw_name)
    return found


def _has_home(entry: pwd.struct_passwd) -> bool:
    try:
        return entry.pw_dir not in ("", "/") and Path(entry.pw_dir).is_dir()
    except OSError:  # we may not enter it, so it exists
        return True


def _logged_in(sessions: Path) -> set[int]:
    """From systemd's runtime folders: one for each user with a session."""
    try:
        return {int(path.name) for path in sessions.iterdir() if path.name.isdecimal()}
    except OSError:
        return set()
