"""Counts calls to the object store by caller."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from batchwright.storage.retry import OPERATIONS
from batchwright.telemetry.metrics import Counts, Labels

COMPONENTS = ("processor", "apiserver", "garbage-collector")
"""The callers of the object store."""
STORAGE_METRIC = replace(
    OPERATIONS,
    help="Calls to the object store (store, retrieve, delete) by how they ended: success, retry (repeated) or "
    "exhausted.",
    prefix="",
    expected=tuple(product(("store", "retrieve", "delete"), COMPONENTS, ("exhausted",))),
)
STORAGE_METRICS = (STORAGE_METRIC,)


class StorageCounts:
    """Counts calls to the object store as three kinds, instead of the store's own seven."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def add(self, name: str, n: float = 1, labels: Labels = ()) -> None:
        operation, component, status = labels
        self._counts.add(name, n, (_OPERATIONS[operation], component, _STATUSES[status]))


_OPERATIONS = {
    "put": "store",
    "get": "retrieve",
    "head": "retrieve",
    "list": "retrieve",
    "delete": "delete",
    "sweep": "delete",
}
_STATUSES = {"success": "success", "retry": "retry", "failure": "exhausted"}
