"""The operations that a worker can run: filled once at start, one operation per name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batchwright.engine.catalog import MARK
from batchwright.engine.operation import Operation
from batchwright.errors import ConfigurationError
from batchwright.plugins import marked

ENTRY_POINTS = "batchwright.operations"


class Registry:
    """Operations by name; two functions with the same name are an error at start."""

    def __init__(self, functions: Iterable[Callable[..., Any]] = ()) -> None:
        self._operations: dict[str, Operation] = {}
        self._names: list[str] = []
        self.sources: dict[str, str] = {}
        for function in functions:
            self.add(function)

    @classmethod
    def load(cls, sources: Sequence[str], *, entry_points: bool = True) -> Registry:
        """Load from modules, files and folders, and from installed packages that offer `batchwright.operations`."""
        registry = cls()
        for source in sources:
            found = list(marked([source], MARK))
            if not found:
                raise ConfigurationError(
                    f"{source} has no operations; mark a function with @operation, or leave {source} out"
                )
            for place, function in found:
                registry.add(function, place)
        for place, function in marked((), MARK, entry_points=ENTRY_POINTS if entry_points else None):
            registry.add(function, place)
        return registry

    def add(self, function: object, source: str | None = None) -> None:
        operation: Operation | None = getattr(function, MARK, None)
        if operation is None:
            raise ConfigurationError(f"{function!r} is not an operation; decorate it with @operation")
        known = self._operations.get(operation.name)
        if known is not None and known.function is not operation.function:
            raise ConfigurationError(
                f"two functions define the operation {operation.name!r}: {_place(known)} and {_place(operation)}; "
                "rename one of them"
            )
        self._operations[operation.name] = operation
        self._names = sorted(self._operations)
        self.sources[operation.name] = source or _source(operation)

    def get(self, name: str) -> Operation | None:
        return self._operations.get(name)

    def names(self) -> list[str]:
        return self._names


def _place(operation: Operation) -> str:
    code = operation.function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _source(operation: Operation) -> str:
    """Where a child process can load the function from: its module, or the file of the main program."""
    module = operation.function.__module__
    if module == "__main__":
        return str(getattr(sys.modules["__main__"], "__file__", "") or module)
    return module
