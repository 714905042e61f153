"""Loads other people's code: modules, files, folders and entry points, all searched for marked objects."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from batchwright.errors import ConfigurationError

BUILT_IN = (
    "batchwright.builtin:EnginePart",
    "batchwright.web.part:WebPart",
    "batchwright.files.part:FilesPart",
    "batchwright.webhooks.part:WebhooksPart",
    "batchwright.providers.part:ProvidersPart",
    "batchwright.batches.part:BatchesPart",
    "batchwright.ingest.part:IngestPart",
)
"""The parts that come with Batchwright, as text, so that lower layers do not import them."""
PARTS = "batchwright.parts"
"""The entry point with which an installed package adds its own part."""


@functools.cache
def part_kinds() -> tuple[Any, ...]:
    """The class of every part: ours, then those of installed packages. Two parts with the same name are an error."""
    offered = [(place, load(place)) for place in BUILT_IN]
    offered += [(entry.value, _load_entry(entry)) for entry in importlib.metadata.entry_points(group=PARTS)]
    places: dict[str, str] = {}
    for place, kind in offered:
        if (other := places.setdefault(kind.name, place)) != place:
            raise ConfigurationError(f"two parts are called {kind.name!r}: {other} and {place}; remove one of them")
    return tuple(dict.fromkeys(kind for _, kind in offered))  # two packages may name the same one


def load(place: Any) -> Any:
    """The object that `package.module:name` refers to; anything but a string is returned as it is."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _load_entry(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigurationError(
            f"the part {entry.name!r} ({entry.value}) of an installed package cannot be loaded: "
            f"{type(error).__name__}: {error}; correct that package, or remove it"
        ) from error
    if not all(hasattr(kind, facet) for facet in ("name", "tables", "work")):  # `Part` is in a layer above this module
        raise ConfigurationError(
            f"the part {entry.name!r} ({entry.value}) of an installed package is not a part: it must be a subclass of "
            "batchwright.part.Part, with a name"
        )
    return kind


def marked(sources: Sequence[str], mark: str, *, entry_points: str | None = None) -> Iterator[tuple[str, object]]:
    """Every object that carries the mark, with the source from which it can be loaded again.

    A source is a module (`shop.jobs`), a file (`jobs.py`) or a folder, whose files are all loaded.
    """
    for source in sources:
        for name, module in _modules(source):
            yield from ((name, found) for found in _marked_in(module, mark))
    if entry_points is not None:
        for entry in importlib.metadata.entry_points(group=entry_points):
            loaded = entry.load()
            module = loaded if isinstance(loaded, ModuleType) else sys.modules[loaded.__module__]
            yield from ((module.__name__, found) for found in _marked_in(module, mark))


def _modules(source: str) -> Iterator[tuple[str, ModuleType]]:
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.py") if not file.name.startswith(("_", ".")))
        if not files:
            raise ConfigurationError(f"the folder {source!r} has no Python files")
        for file in files:
            yield str(file.resolve()), _load_file(file.resolve())
    elif source.endswith(".py"):
        if not path.is_file():
            raise ConfigurationError(f"there is no file {source!r}")
        yield str(path.resolve()), _load_file(path.resolve())
    else:
        yield source, _import(source)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigurationError(
                f"there is no module {name!r} (nor a file or folder of that name); it must be importable from here"
            ) from error
        raise


def _load_file(path: Path) -> ModuleType:
    """Load a file once per process. It can import other files of its folder by name, as when Python runs it."""
    name = f"batchwright_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _marked_in(module: ModuleType, mark: str) -> Iterator[object]:
    """Marked objects that this module or the package's own modules define; objects only imported do not count."""
    for value in (value for value in list(vars(module).values()) if hasattr(value, mark)):
        home = getattr(value, "__module__", module.__name__)
        if home == module.__name__ or (hasattr(module, "__path__") and home.startswith(f"{module.__name__}.")):
            yield value
