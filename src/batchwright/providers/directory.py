"""The providers of a configuration; each is created on first use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cached_property
from zlib import crc32

from batchwright.errors import ConfigurationError, InvalidInput
from batchwright.inference.budgets import RateBudget, RateLimits
from batchwright.providers.contract import Abilities, Adapter, TaskType
from batchwright.providers.errand import Pace
from batchwright.providers.metered import MeteredAdapter
from batchwright.providers.polls import Polls
from batchwright.providers.registry import find_adapters, read_settings
from batchwright.providers.settings import ProviderSettings, TaskSettings
from batchwright.providers.tools import AdapterTools

_NONE = ProviderSettings()


class Directory:
    """Every provider by the name that tasks use: those in the configuration, and the adapters under their own names."""

    def __init__(
        self,
        providers: Mapping[str, ProviderSettings],
        tasks: TaskSettings,
        tools: AdapterTools | None = None,
        *,
        open_budget: Callable[[str, RateLimits], RateBudget] | None = None,
    ) -> None:
        """Without `open_budget`, for example without a database, calls are not counted."""
        self._written = providers
        self._tasks = tasks
        self._tools = tools
        self._open_budget = open_budget
        self._made: dict[str, Adapter] = {}
        self._polls: dict[str, Polls] = {}

    @cached_property
    def kinds(self) -> Mapping[str, type[Adapter]]:
        return find_adapters(self._tasks.adapters)

    @cached_property
    def names(self) -> list[str]:
        return sorted({*self.kinds, *self._written})

    def is_known(self, name: str) -> bool:
        return name in self._written or name in self.kinds

    def settings(self, name: str) -> ProviderSettings:
        return self._written.get(name, _NONE)

    def kind(self, name: str) -> type[Adapter]:
        """The adapter's class. The error for an unknown name lists the known ones."""
        if not self.is_known(name):
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(self.names)}"
            raise InvalidInput(f"there is no provider {name[:100]!r}; {hint}", param="provider")
        kind = self.settings(name).kind or name
        if kind not in self.kinds:
            raise ConfigurationError(
                f"providers.{name} has the kind {kind!r}, and there is no such adapter; use one of: "
                f"{', '.join(self.kinds)}"
            )
        return self.kinds[kind]

    def get(self, name: str) -> Adapter:
        """The adapter of this provider, with its settings."""
        if name not in self._made:
            kind = self.kind(name)
            assert self._tools is not None, "a directory without tools only knows names"
            made = kind(read_settings(kind, self.settings(name).adapter), self._tools)
            budget = self.budget(name)
            self._made[name] = made if budget is None else MeteredAdapter(made, budget)
        return self._made[name]

    def budget(self, name: str) -> RateBudget | None:
        """The budget for calls to a provider; None if it has no limits."""
        written = self.settings(name)
        if self._open_budget is None or (written.requests_per_minute is None and written.concurrency is None):
            return None
        limits = RateLimits(requests_per_minute=written.requests_per_minute, concurrency=written.concurrency)
        return self._open_budget(f"providers/{name}", limits)

    def missing(self, name: str) -> str | None:
        """The setting or credential that a provider lacks, as text; None if it lacks nothing."""
        try:
            return self.get(name).missing_credentials()
        except ConfigurationError as error:
            return str(error)

    def abilities(self, name: str) -> Abilities:
        """The abilities, narrowed by its settings if the required ones are present."""
        try:
            return self.get(name).abilities
        except ConfigurationError:
            return self.kind(name).abilities

    def can_do(self, task_type: TaskType) -> list[str]:
        """The providers that accept tasks of this type."""
        return [name for name in self.names if task_type in self.kind(name).abilities.task_types]

    def pace(self, name: str) -> Pace:
        written, abilities = self.settings(name), self.get(name).abilities
        settle = written.settle_seconds if written.settle_seconds is not None else abilities.settle_seconds
        seconds = written.poll_interval_seconds or self._tasks.poll_interval_seconds
        if name not in self._polls:
            self._polls[name] = Polls(seconds)
        offset = crc32(name.encode()) / 2**32 * seconds if abilities.can_survey else None
        return Pace(poll_seconds=seconds, settle_seconds=settle, poll=self._polls[name].poll, offset_seconds=offset)

    def timeout_hours(self, name: str) -> float:
        """The timeout from the provider's table, or else the longer of our default and the provider's window."""
        written = self.settings(name).task_timeout_hours
        return written or max(self._tasks.task_timeout_hours, self.abilities(name).timeout_hours)
