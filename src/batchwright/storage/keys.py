"""Names of objects: folders and a name, in characters that every store and file system takes as they are."""

from __future__ import annotations

import hashlib
import re

from batchwright.errors import InvalidInput

KEY_CHARACTERS_MAX = 512
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,199}")  # no leading dot: neither "..", nor our drafts


def checked(key: str) -> str:
    """The key itself, or InvalidInput."""
    if len(key) > KEY_CHARACTERS_MAX or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise InvalidInput(
            f"{key[:80]!r} cannot name an object: write folders and a name with '/' between them, each of at most 200 "
            f"letters, digits and '_', '-', '=', '.' that does not begin with a dot, {KEY_CHARACTERS_MAX} in all; "
            "hashed() makes such a name of any text"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """A folder, or nothing for all; with or without its last slash."""
    return checked(prefix.removesuffix("/")) if prefix else ""


def hashed(*names: str) -> str:
    """A segment for any names, such as a tenant's: 32 hexadecimal digits, other for other names.

    >>> hashed("Ärzte/../ohne Grenzen")
    'fd9ccfbee249ae255a70fe1a70545a62'
    """
    digest = hashlib.sha256()
    for name in names:
        text = name.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8) + text)  # so that ("ab", "c") is not ("a", "bc")
    return digest.hexdigest()[:32]
