"""What requests to models cost, before they are sent and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from batchwright.inference.answers import Usage
from batchwright.inference.calls import Call
from batchwright.inference.prices import Lane, ListedPrice, Price, cost_of, find_model_price


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The user's prices, and those of the built-in list. An unknown price is None, never 0."""

    overrides: Mapping[str, Price] = field(default_factory=dict)

    def find(self, model: str, lane: str) -> ListedPrice | None:
        """The price of a model. Without a batch price, use the realtime price: a batch costs at most that."""
        wanted: Lane = "batch" if lane == "batch" else "realtime"
        found = find_model_price(model, lane=wanted, overrides=self.overrides)
        return found or find_model_price(model, lane="realtime", overrides=self.overrides)

    def cost(self, model: str, lane: str, usage: Usage) -> Decimal | None:
        return cost_of(
            self.find(model, lane),
            prompt_tokens=usage.input,
            completion_tokens=usage.output,
            cached_tokens=usage.cached or 0,
        )

    def guess(self, model: str, lane: str, call: Call) -> Decimal | None:
        """Maximum cost of a request: its prompt, and the longest answer."""
        prompt = sum(call.tokens_each)
        answer = max(0, call.tokens_guess - prompt)
        return cost_of(self.find(model, lane), prompt_tokens=prompt, completion_tokens=answer)


def show_amount(amount: Decimal | None) -> str:
    """In dollars, with as many digits as a small amount needs: one request may cost a millionth."""
    if not amount:
        return "0"
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.{2 - amount.adjusted()}f}".rstrip("0").rstrip(".")
