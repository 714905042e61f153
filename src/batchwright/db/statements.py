"""Named SQL statements, read from the .sql file beside the module that runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_PART = re.compile(r"(?<!:):(\w+)\b")
_NOW = "coalesce(%(now)s::timestamptz, now())"


def statements(package: str, filename: str) -> Mapping[str, str]:
    """Read `-- name: verb` blocks.

    `:now` stands for the `now` parameter, or the server's clock when that is null: tests own the time. A block
    `-- part: x` is text that several statements share; it stands where they say `:x`. Comments are dropped, because
    the server would parse them each time.
    """
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    pieces = _NAME.split(text)[1:]
    blocks = list(zip(pieces[::3], pieces[1::3], map(_bare, pieces[2::3]), strict=True))
    if len({name for _, name, _ in blocks}) < len(blocks):
        raise ValueError(f"{package}/{filename} names a statement twice")
    parts = {"now": _NOW}
    for kind, name, sql in blocks:
        if kind == "part":
            parts[name] = _with_parts(sql, parts)
    return MappingProxyType({name: _with_parts(sql, parts) for kind, name, sql in blocks if kind == "name"})


def _with_parts(sql: str, parts: Mapping[str, str]) -> str:
    return _PART.sub(lambda found: parts.get(found[1], found[0]), sql)


def _bare(sql: str) -> str:
    lines = (line.rstrip() for line in sql.splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("--"))
