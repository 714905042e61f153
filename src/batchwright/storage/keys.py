"""Names of objects: folders and a name, in characters that every store and file system accepts unchanged."""

from __future__ import annotations

import re

from batchwright.errors import InvalidInput

KEY_CHARACTERS_MAX = 512
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,199}")  # no leading dot: neither "..", nor our drafts


def checked(key: str) -> str:
    """The key itself, or InvalidInput."""
    if len(key) > KEY_CHARACTERS_MAX or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidInput(
            f"{key[:80]!r} cannot name an object: write folders and a name with '/' between them, each of at most 200 "
            f"letters, digits and '_', '-', '=', '.' that does not begin with a dot, {KEY_CHARACTERS_MAX} in all"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """A folder, or nothing for all; with or without its last slash."""
    return checked(prefix.removesuffix("/")) if prefix else ""
