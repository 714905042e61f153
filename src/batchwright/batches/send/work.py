"""One shard that this worker holds: what its requests need, and why it stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from batchwright.batches.journal.envelopes import RequestIds
from batchwright.batches.journal.journal import Journal
from batchwright.batches.plan.lines import split
from batchwright.batches.plan.planfile import Entry
from batchwright.batches.send.schedule import Backlog, Item
from batchwright.inference.gateway import Request

if TYPE_CHECKING:
    from batchwright.batches.send.sender import Sender


_AHEAD_BYTES = 256 * 1024
_GAP_BYTES_MAX = 4096
"""Lines count as consecutive if no more than this is between them."""


class End(Enum):
    """Why a shard stops before its last request."""

    STOP = "the batch is stopping"
    DEADLINE = "the completion window is over"
    PAUSE = "the batch is paused"
    LEAVE = "the worker stops"
    FULL = "there is no room for the journal"
    LOST = "another worker has the shard"
    BROKEN = "an internal error; see the log"


class Lines:
    """Lines of an input file, by their offsets.

    For consecutive lines, the following ones are read ahead. A system call releases the interpreter lock, and taking it
    back from the HTTP client's thread costs more than reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self._ahead = b""
        self._next = 0
        """Where the line that was read last ends."""

    def read(self, offset: int, length: int) -> bytes:
        place = offset - self._start
        if not 0 <= place <= len(self._ahead) - length:
            follows = 0 <= offset - self._next <= _GAP_BYTES_MAX
            self._ahead = os.pread(self._descriptor, max(length, _AHEAD_BYTES) if follows else length, offset)
            self._start, place = offset, 0
        self._next = offset + length
        return self._ahead[place : place + length]


@dataclass(eq=False, slots=True, kw_only=True)
class Work:
    """One shard that this worker holds."""

    batch_id: str
    tenant: str
    place: int
    """Where the shard begins in the plan."""
    total: int
    """Requests of the shard, including those that were answered before."""
    model: str
    traceparent: str | None
    deadline: float
    """By the monotonic clock."""
    descriptor: int
    """The input file."""
    lines: Lines = field(init=False, repr=False)
    journal: Journal
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of the batch's creator, for the model server."""
    ids: RequestIds = field(init=False, repr=False)
    backlog: Backlog = field(init=False)
    sender: Sender = field(init=False)
    end: End | None = None
    tasks: dict[Item, asyncio.Task[None]] = field(default_factory=dict)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing is in flight and nothing more will be sent."""

    def __post_init__(self) -> None:
        self.ids = RequestIds(self.batch_id)
        self.lines = Lines(self.descriptor)

    def request(self, entry: Entry, now: float) -> tuple[str, Request]:
        offset = entry.offset
        custom_id, url, body = split(self.lines.read(offset, entry.length))
        return custom_id, Request(
            url=url,
            body=body,
            id=self.ids.on_the_wire(offset),
            traceparent=self.traceparent,
            headers=self.headers,
            seconds_left=self.deadline - now,
        )

    def stop(self, reason: End) -> None:
        """Send nothing more of this shard; requests in flight may finish."""
        if self.end is None:
            self.end = reason
            self.sender.schedule.withdraw(self.backlog)
            self.look()

    def look(self) -> None:
        """Check whether the shard is done; call this after every event."""
        if self.backlog.is_empty:
            self.quiet.set()

    def abort(self) -> None:
        """Close the connections of requests in flight.

        A task that is cancelled before its first step never runs, and would keep its slots. So all of them are started
        first.
        """
        loop = asyncio.get_running_loop()
        for task in list(self.tasks.values()):
            loop.call_soon(task.cancel)
