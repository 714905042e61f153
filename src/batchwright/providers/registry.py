"""Finds the adapters: in `adapters/`, in folders that users name, and in installed packages."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic

from batchwright import plugins
from batchwright.errors import ConfigurationError
from batchwright.providers import adapters
from batchwright.providers.contract import Adapter
from batchwright.providers.tools import AdapterTools

ENTRY_POINTS = "batchwright.providers"
"""The entry point group in which an installed package registers a provider."""
_MARK = "abilities"


def find_adapters(sources: Sequence[str] = ()) -> Mapping[str, type[Adapter]]:
    """Every adapter by name: built-in ones, those in modules, files and folders, and those in installed packages."""
    ours = [f"{adapters.__name__}.{module.name}" for module in pkgutil.iter_modules(adapters.__path__)]
    found: dict[str, type[Adapter]] = {}
    for kind in _kinds([*ours, *sources]):
        other = found.setdefault(kind.name, kind)
        if other is not kind:
            raise ConfigurationError(f"two providers are called {kind.name!r}: {_place(other)} and {_place(kind)}")
    return dict(sorted(found.items()))


def make_adapter(
    kinds: Mapping[str, type[Adapter]], name: str, settings: Mapping[str, Any], tools: AdapterTools
) -> Adapter:
    """The adapter with this name, created with the settings as the user wrote them."""
    kind = kinds.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, kinds, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(kinds)}"
        raise ConfigurationError(f"there is no provider {name!r}; {hint}")
    return kind(read_settings(kind, settings), tools)


def read_settings(kind: type[Adapter], written: Mapping[str, Any]) -> Any:
    """The checked settings of a provider. Errors never repeat a wrong value, because it may be a secret."""
    known = kind.Settings.__dataclass_fields__
    for name in written:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigurationError(f"the provider {kind.name} has no setting {name}; {hint}")
    try:
        return pydantic.TypeAdapter(kind.Settings).validate_python(dict(written))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"the setting {where} of the provider {kind.name}: {first['msg']}") from None


def _kinds(sources: Sequence[str]) -> Iterator[type[Adapter]]:
    """Adapters that have their own name. A base class that they share has none."""
    for _, found in plugins.marked(sources, _MARK, entry_points=ENTRY_POINTS):
        if isinstance(found, type) and issubclass(found, Adapter) and "name" in vars(found):
            yield found


def _place(kind: type[Adapter]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
