"""Writes the results of a task: those of each job into the store, and all of them into one file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from batchwright.providers import state
from batchwright.providers.contract import Result, Status, Usage
from batchwright.providers.errand import Errand
from batchwright.providers.jobs import RemoteJob
from batchwright.providers.lines import split_lines
from batchwright.providers.prices import Bill, Price
from batchwright.providers.tasks import Task
from batchwright.storage import Store


class Harvest:
    """Writes the results of one job into the store, and counts them."""

    def __init__(self, task: Task, errand: Errand, status: Status, price: Price | None, inline_bytes_max: int) -> None:
        self._task = task
        self._errand = errand
        self._price = price
        self._inline_bytes_max = inline_bytes_max
        self._status = status
        self._inputs = {input.id: input for input in task.inputs}
        self._reset()

    def _reset(self) -> None:
        self.total = 0
        self.succeeded = 0
        self.first_error: str | None = None
        self.usage = Usage()
        self.bill = Bill(self._price)
        self._entries: list[dict[str, Any]] = []
        self._entries_bytes = 0

    async def lines(self) -> AsyncIterator[bytes]:
        """One pass over the results, one line for each."""
        self._reset()
        async for result in self._errand.results(self._status):
            self.total += 1
            if result.error is None:
                self.succeeded += 1
            elif self.first_error is None:
                self.first_error = str(result.error.get("message"))
            self.usage += result.usage
            self.bill.add(result)
            entry = self._entry(result)
            line = orjson.dumps(entry) + b"\n"
            self._entries_bytes += len(line)
            if self._entries_bytes <= self._inline_bytes_max:
                self._entries.append(entry)
            yield line

    def small_entries(self) -> list[dict[str, Any]]:
        """The results, if they are small enough for the document of their job."""
        return self._entries if self._entries_bytes <= self._inline_bytes_max else []

    def _entry(self, result: Result) -> dict[str, Any]:
        if self._task.task_type == "completion":
            return output_line(result, self._errand.row.provider, self._errand.request.model)
        return state.make_entry(self._inputs[result.key], result)


def output_line(result: Result, provider: str, model: str | None) -> dict[str, Any]:
    """A line of a completion's result file: OpenAI's output line, with the provider and the model that gave it."""
    if result.value is not None:
        return {**result.value, "provider": provider, "model": model}
    error = dict(result.error or {})
    response = error.pop("response", None)
    return {
        "id": f"batch_req_{result.key}",
        "custom_id": result.key,
        "response": response,
        "error": {"code": error.get("code"), "message": error.get("message"), "kind": error.get("kind")},
        "provider": provider,
        "model": model,
    }


class Merge:
    """The result file of a task, built from the results of its jobs, a piece at a time."""

    def __init__(self, store: Store, task: Task, rows: Sequence[RemoteJob], provider: str) -> None:
        self._store = store
        self._task = task
        self._rows = [row for row in rows if row.results_key is not None]
        self._provider = provider

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._task.task_type == "completion":
            for row in self._rows:
                async for chunk in self._store.get(row.results_key or ""):
                    yield chunk
            return
        if not state.is_merged_by_model(self._provider):
            yield b'{"transcriptions":['
            async for chunk in self._entries(self._rows):
                yield chunk
            yield b"]}\n"
            return
        by_model: dict[str, list[RemoteJob]] = {}
        for row in self._rows:
            by_model.setdefault(row.model or "", []).append(row)
        before = b"{"
        for model, rows in by_model.items():
            yield before + orjson.dumps(model) + b':{"transcriptions":['
            async for chunk in self._entries(rows):
                yield chunk
            yield b"]}"
            before = b","
        yield b"}\n" if by_model else b"{}\n"

    async def _entries(self, rows: Sequence[RemoteJob]) -> AsyncIterator[bytes]:
        is_first = True
        for row in rows:
            async for line in split_lines(self._store.get(row.results_key or "")):
                if line is not None:
                    yield line if is_first else b"," + line
                    is_first = False
