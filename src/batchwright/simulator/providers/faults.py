"""Faults of the contract server: what can go wrong on a route or with a job, and how a rule is written."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchwright.errors import InvalidInput

WIRE = {
    "auth": "the credential is refused",
    "drop": "the request is carried out, and the connection closes without an answer",
    "expired_url": "a signed URL is refused as expired",
    "hang": "the request is carried out, but the answer never arrives",
    "hang_up": "the connection closes before the request is carried out",
    "not_json": "the answer is an HTML page",
    "quota": "the account has used up its quota",
    "slow": "the answer arrives in small pieces, `seconds` apart",
    "truncate": "the answer is cut off in the middle",
}
"""Faults of a request, other than the statuses 400 to 599."""
JOB = {
    "duplicate": "a result appears twice",
    "empty": "the job ends without any result",
    "expired": "the job expires with only a `share` of its results",
    "failed": "the job fails as a whole",
    "lag": "the job is missing from lists for `seconds`",
    "malformed": "a result is cut in half",
    "missing": "a result is missing",
    "partial": "every second result (or as `every` says) fails with `status`",
    "shuffled": "results arrive in another order",
    "stranger": "there is a result for an unknown request",
    "unknown_status": "the running job has an unknown status",
}
"""Faults of a job; they are decided when it is created."""
_NUMBERS = {"accepted": int, "every": int, "seconds": float, "share": float, "status": int, "times": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rule."""

    kind: str
    route: str = "*"
    """Routes that it hits, such as `openai.create`, `*.list` or `sarvam`."""
    match: str | None = None
    """Only requests that contain this text in their path, query or body."""
    times: int | None = None
    """Number of requests or jobs that it hits; by default all."""
    accepted: int = 0
    """Whether the error is returned after the request was carried out."""
    code: str | None = None
    """The provider's error code, or the unknown status."""
    every: int = 2
    message: str | None = None
    retry_after: str | None = None
    """Seconds; or `date+30`, which sends the date in 30 seconds."""
    seconds: float = 30.0
    share: float = 0.5
    status: int = 0

    def __str__(self) -> str:
        changed = [one.name for one in dataclasses.fields(self)[1:] if getattr(self, one.name) != one.default]
        return ":".join([self.kind, *(f"{name}={getattr(self, name)}" for name in changed)])


def parse(text: str) -> Fault:
    """`429:route=*.create:retry_after=7:times=1`: the kind, and its options."""
    kind, *rest = text.strip().split(":")
    if kind not in WIRE and kind not in JOB and not re.fullmatch("[45][0-9][0-9]", kind):
        known = ", ".join([*WIRE, *JOB])
        raise InvalidInput(f"fault {text!r}: there is no kind {kind!r}; use 400 to 599, {known}")
    values = dict(part.partition("=")[::2] for part in rest)
    fields = {one.name for one in dataclasses.fields(Fault)} - {"kind"}
    if unknown := set(values) - fields:
        raise InvalidInput(
            f"fault {text!r}: {unknown.pop()!r} is not an option; use one of: {', '.join(sorted(fields))}"
        )
    try:
        return Fault(kind=kind, **{name: _NUMBERS.get(name, str)(value) for name, value in values.items()})
    except ValueError as error:
        raise InvalidInput(f"fault {text!r}: {error}") from error


class Faults:
    """The rules in force, and how often each has hit."""

    def __init__(self, rules: Sequence[str | Fault]) -> None:
        self.put(rules)

    def put(self, rules: Sequence[str | Fault]) -> None:
        self.rules = [parse(one) if isinstance(one, str) else one for one in rules]
        self.fired = [0] * len(self.rules)

    def of_request(self, route: str, asked: str) -> Fault | None:
        """The first rule that hits this request."""
        return next(self._hits(route, asked, is_job=False), None)

    def of_job(self, provider: str, asked: str) -> dict[str, Fault]:
        """All rules that hit a new job."""
        return {one.kind: one for one in self._hits(f"{provider}.create", asked, is_job=True)}

    def _hits(self, route: str, asked: str, *, is_job: bool) -> Iterator[Fault]:
        for index, rule in enumerate(self.rules):
            is_spent = rule.times is not None and self.fired[index] >= rule.times
            is_here = any(fnmatch.fnmatchcase(one, rule.route) for one in (route, route.partition(".")[0]))
            is_asked = rule.match is None or rule.match in asked
            if (rule.kind in JOB) == is_job and is_here and is_asked and not is_spent:
                self.fired[index] += 1
                yield rule
