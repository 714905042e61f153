"""Named SQL statements, read from the .sql file beside the module that runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_NOW = "coalesce(%(now)s::timestamptz, now())"


def statements(package: str, filename: str) -> Mapping[str, str]:
    """Read `-- name: verb` blocks.

    `:now` stands for the `now` parameter, or the server's clock when that is null: tests own the time. Comments
    are dropped, because the server would parse them each time.
    """
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    pieces = _NAME.split(text)[1:]
    named = dict(zip(pieces[::2], map(_bare, pieces[1::2]), strict=True))
    if len(named) * 2 != len(pieces):
        raise ValueError(f"{package}/{filename} names a statement twice")
    return MappingProxyType(named)


def _bare(sql: str) -> str:
    lines = (line.rstrip() for line in sql.splitlines())
    kept = (line for line in lines if line and not line.lstrip().startswith("--"))
    return "\n".join(kept).replace(":now", _NOW)
