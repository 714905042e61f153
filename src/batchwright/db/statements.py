"""Named SQL statements, read from the .sql files beside the module that runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_PART = re.compile(r"(?<!:):(\w+)\b")
_NOW = "coalesce(%(now)s::timestamptz, now())"


def statements(package: str, *filenames: str, parts: Mapping[str, str] = MappingProxyType({})) -> Mapping[str, str]:
    """Read `-- name: verb` blocks of one file, or of several that share their parts.

    `:now` is the `now` parameter, or the server's clock if that is null: tests control the time. A block
    `-- part: x` is text that several statements share; it replaces `:x` in them. `parts` come from another package.
    Comments are dropped, because the server would parse them each time.
    """
    blocks = _read_blocks(package, filenames)
    parts = _collect_parts(blocks, parts)
    return MappingProxyType({name: _insert_parts(sql, parts) for kind, name, sql in blocks if kind == "name"})


def shared_parts(package: str, *filenames: str) -> Mapping[str, str]:
    """Read `-- part: x` blocks, for the statements of other packages."""
    return MappingProxyType(_collect_parts(_read_blocks(package, filenames), {}))


def _read_blocks(package: str, filenames: Sequence[str]) -> list[tuple[str, str, str]]:
    text = "\n".join(files(package).joinpath(name).read_text(encoding="utf-8") for name in filenames)
    pieces = _NAME.split(text)[1:]
    blocks = list(zip(pieces[::3], pieces[1::3], map(_strip_comments, pieces[2::3]), strict=True))
    if len({name for _, name, _ in blocks}) < len(blocks):
        raise ValueError(f"{package}/{'+'.join(filenames)} names a statement twice")
    return blocks


def _collect_parts(blocks: Sequence[tuple[str, str, str]], known: Mapping[str, str]) -> dict[str, str]:
    parts = {"now": _NOW, **known}
    for kind, name, sql in blocks:
        if kind == "part":
            parts[name] = _insert_parts(sql, parts)
    return parts


def _insert_parts(sql: str, parts: Mapping[str, str]) -> str:
    return _PART.sub(lambda found: parts.get(found[1], found[0]), sql)


def _strip_comments(sql: str) -> str:
    lines = (line.rstrip() for line in sql.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("--"))
