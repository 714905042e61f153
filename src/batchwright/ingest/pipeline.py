"""The graph of steps: a step is a function with a name, the steps before it, and a fingerprint.

    @step("LANGUAGE_FOUND", after="CONTENT_EXTRACTED", before="PERSISTED")
    async def find_language(ctx: StepContext) -> dict[str, str]:
        text = await ctx.text()
        ...

The steps form a partial order: those that do not wait for each other run at the same time. Every step has a key,
computed from its fingerprint and the keys of the steps before it; the first key follows from the document's bytes. If
the live version has the same key for a step, the step does not run: its output is reused. So a new chunker repeats the
chunks and the steps after them, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

import orjson

from batchwright.errors import ConfigurationError
from batchwright.plugins import marked

MARK = "__batchwright_step__"
ENTRY_POINTS = "batchwright.steps"
ENQUEUED = "ENQUEUED"
DONE = "DONE"
FAILED = "FAILED"
_RESERVED = frozenset({ENQUEUED, DONE, FAILED})
_NAME_CHARACTERS_MAX = 64
_BUILT_IN = "batchwright.ingest.steps"
_MODULES = ("fetch", "extract", "chunk", "embed", "entities", "persist", "index")

F = TypeVar("F", bound=Callable[..., Any])
Config = Mapping[str, Any]
"""The settings of a run, as they were when it was created."""
Fingerprint = Callable[[Config], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the pipeline."""

    name: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    run: Callable[[Any], Awaitable[Any]]
    fingerprint: Fingerprint
    """What its output depends on in addition to the steps before it: settings, and the version of its code."""
    is_reusable: bool = True
    """Whether the output of the live version can be reused."""


def step(
    name: str,
    *,
    after: str | Sequence[str],
    before: str | Sequence[str] = (),
    fingerprint: str | Fingerprint = "1",
    is_reusable: bool = True,
) -> Callable[[F], F]:
    """Mark an async function as the step with this name.

    It runs when the steps in `after` are done; those in `before` wait for it. Change the fingerprint when the step
    would give another output, so that it runs again for documents that were done before. A step that writes rows of
    the new version is not reusable: its output is useless without them.
    """

    def mark(function: F) -> F:
        made = Step(
            name=name,
            after=_names(after),
            before=_names(before),
            run=function,
            fingerprint=fingerprint if callable(fingerprint) else lambda _: fingerprint,
            is_reusable=is_reusable,
        )
        setattr(function, MARK, made)
        return function

    return mark


class Graph:
    """All steps, checked: every name is unique and known, no step waits for itself, and there is one first step."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps: dict[str, Step] = {}
        for one in steps:
            _check_name(one.name)
            if one.name in self.steps:
                raise ConfigurationError(f"two steps are called {one.name!r}; rename one of them")
            self.steps[one.name] = one
        self.waits_for = {name: self._find_waits(name) for name in self.steps}
        self.order = self._sort()
        self._above = self._find_above()
        firsts = [name for name in self.order if not self.waits_for[name]]
        if len(firsts) != 1:
            raise ConfigurationError(
                f"only one step may come first, not {', '.join(firsts) or 'none'}; write after=… for the others"
            )
        self.first = firsts[0]
        self._levels = self._find_levels()

    def ready(self, done: Iterable[str]) -> list[str]:
        """The steps that can run now, in the order of the graph."""
        done = set(done)
        return [name for name in self.order if name not in done and self._above[name] <= done]

    def reached(self, done: Iterable[str]) -> str:
        """The last step of the last level whose steps are all done; levels with unfinished branches do not count."""
        done, last = set(done), ENQUEUED
        for level in self._levels:
            if not done.issuperset(level):
                break
            last = level[-1]
        return last

    @property
    def stages(self) -> list[list[str]]:
        """The steps of each level, in order. Those of a level run in parallel; `reached` returns the last of them."""
        return [list(level) for level in self._levels]

    def key(self, name: str, keys: Mapping[str, str], config: Config, content: str) -> str:
        """A digest of what the output of a step depends on; `content` is the digest of the document's bytes."""
        above = sorted(keys[one] for one in self.waits_for[name])
        said = orjson.dumps([name, self.steps[name].fingerprint(config), above or [content]])
        return hashlib.sha256(said).hexdigest()

    def recipe(self, config: Config) -> str:
        """A digest of all fingerprints: a document with the same recipe needs no steps."""
        said = [
            [name, sorted(self.waits_for[name]), self.steps[name].fingerprint(config)] for name in sorted(self.steps)
        ]
        return hashlib.sha256(orjson.dumps(said)).hexdigest()

    def _find_waits(self, name: str) -> frozenset[str]:
        for other in (*self.steps[name].after, *self.steps[name].before):
            if other not in self.steps:
                raise ConfigurationError(
                    f"the step {name!r} names {other!r}, which is not a step; known: {', '.join(sorted(self.steps))}"
                )
        asked = {one.name for one in self.steps.values() if name in one.before}
        return frozenset({*self.steps[name].after, *asked})

    def _sort(self) -> list[str]:
        try:
            return list(TopologicalSorter(self.waits_for).static_order())
        except CycleError as error:
            raise ConfigurationError(f"steps wait for each other: {' → '.join(error.args[1])}") from None

    def _find_above(self) -> dict[str, set[str]]:
        """All steps before each step, direct and indirect: one of them may have to run again."""
        above: dict[str, set[str]] = {}
        for name in self.order:
            waits = self.waits_for[name]
            above[name] = {*waits, *(one for other in waits for one in above[other])}
        return above

    def _find_levels(self) -> list[list[str]]:
        depth: dict[str, int] = {}
        for name in self.order:
            depth[name] = 1 + max((depth[one] for one in self.waits_for[name]), default=-1)
        return [sorted(name for name in depth if depth[name] == level) for level in range(max(depth.values()) + 1)]


def load_steps(sources: Sequence[str] = ()) -> Graph:
    """Our own steps, those of installed packages, and those of the user's modules, files and folders."""
    built_in = [f"{_BUILT_IN}.{name}" for name in _MODULES]
    found = [mark for _, mark in marked([*built_in, *sources], MARK, entry_points=ENTRY_POINTS)]
    steps = [getattr(function, MARK) for function in found]
    return Graph({id(one): one for one in steps}.values())


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_name(name: str) -> None:
    if name in _RESERVED:
        raise ConfigurationError(f"no step can be called {name!r}: that name is reserved")
    if not name.isidentifier() or not name.isupper() or len(name) > _NAME_CHARACTERS_MAX:
        raise ConfigurationError(f"the step {name!r} needs a name of capitals, digits and _, such as LANGUAGE_FOUND")
