"""What a worker must know of an operation to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from batchwright.engine.jobs import OnHeld

Kind = Literal["async", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A named function with the schema of its payload and its options."""

    name: str
    function: Callable[..., Any]
    kind: Kind
    takes_context: bool
    encode: Callable[[Any], Any]
    """Validate a payload and turn it into plain JSON values; raises PayloadInvalid."""
    arguments: Callable[[Any], dict[str, Any]]
    """Turn a stored payload into the keyword arguments of the function; raises PayloadInvalid."""
    payload_schema: Mapping[str, Any]
    description: str | None = None
    queue: str = "default"
    priority: int = 5
    max_attempts: int = 3
    timeout_seconds: float | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    backoff_seconds: float = 2.0
    backoff_seconds_max: float = 600.0
    exclusive_key: tuple[str, ...] = ()
    """Payload fields whose values, after the operation's name, form the key; empty for no key."""
    on_held: OnHeld = OnHeld.QUEUE

    def defaults(self) -> dict[str, Any]:
        """What an enqueue elsewhere needs to know, published with the schema."""
        return {
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "on_held": self.on_held.value,
            "exclusive_key": list(self.exclusive_key),
        }


class Operations(Protocol):
    """The part of the registry that the engine uses."""

    def get(self, name: str) -> Operation | None: ...

    def names(self) -> list[str]: ...
