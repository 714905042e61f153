"""A ledger in memory, which checks the order of its calls."""

from __future__ import annotations

from batchwright.inference.answers import Usage


class MemoryLedger:
    def __init__(self) -> None:
        self.begun = {}
        self.values = {}
        self.usage = {}
        self.failed = {}
        self.refusals = []
        """Errors that `begin` raises, one for each call; None means that the call succeeds."""

    @property
    def open(self):
        return self.begun.keys() - self.usage.keys() - self.failed.keys()

    @property
    def tokens(self):
        """All paid tokens, settled or not."""
        paid = [*self.usage.values(), *(answer.usage for _, answer in self.failed.values())]
        return sum(one.input or 0 for one in paid), sum(one.output or 0 for one in paid)

    async def begin(self, call):
        assert call.id not in self.begun
        if self.refusals and (error := self.refusals.pop(0)) is not None:
            raise error
        self.begun[call.id] = call

    async def settle(self, call, values, usage, answer):
        assert call.id in self.open
        assert values.keys() <= set(call.keys)
        assert isinstance(usage, Usage)
        assert not values.keys() & self.values.keys(), "paid for twice"
        self.usage[call.id] = usage
        self.values |= values

    async def fail(self, call, error, answer):
        assert call.id in self.open
        self.failed[call.id] = error, answer
