"""Which names in a folder or a bucket to read: patterns as in shells, with `**` for any number of folders."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Sequence

from batchwright.errors import InvalidInput
from batchwright.ingest.extract.detect import EXTENSIONS
from batchwright.ingest.sources.listing import Reason

PATTERNS_MAX = 100
PATTERN_CHARACTERS_MAX = 500


class Patterns:
    """Without a slash, a pattern matches a file or folder anywhere; with one, it matches the path. Case is ignored.

    >>> Patterns(["*.log"], ["drafts/"]).refusal("2024/drafts/a.log")
    (<Reason.EXCLUDED: 'excluded'>, 'it is excluded')
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        if len(include) + len(exclude) > PATTERNS_MAX:
            raise InvalidInput(f"there are more than {PATTERNS_MAX} patterns", param="include")
        self._include = [_Pattern(text) for text in include]
        self._exclude = [_Pattern(text) for text in exclude]

    def is_excluded(self, name: str) -> bool:
        """Whether to leave out this file, or this folder with everything in it, by its full relative name."""
        parts = name.lower().split("/")
        return any(pattern.matches(parts) for pattern in self._exclude)

    def refusal(self, name: str) -> tuple[Reason, str] | None:
        """Why a file is left out; None if it is read."""
        parts = name.lower().split("/")
        if any(pattern.matches(parts[:end]) for pattern in self._exclude for end in range(1, len(parts) + 1)):
            return Reason.EXCLUDED, "it is excluded"
        if self._include:
            if any(pattern.matches(parts) for pattern in self._include):
                return None
            return Reason.EXCLUDED, "no pattern of `include` matches"
        extension = posixpath.splitext(parts[-1])[1]
        if extension.removeprefix(".") in EXTENSIONS:
            return None
        what = f"the extension {extension}" if extension else "a name without an extension"
        return Reason.UNSUPPORTED, f"{what} is not read; add a pattern to `include` if its format is supported"


class _Pattern:
    def __init__(self, text: str) -> None:
        plain = text.strip().removeprefix("./").strip("/").lower()
        if not plain or len(text) > PATTERN_CHARACTERS_MAX:
            raise InvalidInput(
                f"the pattern {text[:80]!r} is empty or longer than {PATTERN_CHARACTERS_MAX} characters; write it like "
                "*.pdf or 2024/**/*.md",
                param="include",
            )
        parts = plain.split("/")
        if len(parts) == 1 and not text.strip().startswith(("/", "./")):
            parts = ["**", *parts]
        # `fnmatch` creates expressions without endless backtracking; folders are matched part by part.
        self._parts = [None if part == "**" else re.compile(fnmatch.translate(part), re.DOTALL) for part in parts]

    def matches(self, names: Sequence[str]) -> bool:
        """One pass over the parts: `reached` has the numbers of names that the parts so far can match."""
        reached = {0}
        for part in self._parts:
            if part is None:
                reached = set(range(min(reached), len(names) + 1))
            else:
                reached = {at + 1 for at in reached if at < len(names) and part.match(names[at])}
            if not reached:
                return False
        return len(names) in reached
