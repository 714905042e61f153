"""Checks an input file before anything is sent: every problem, and an estimate of tokens and cost.

All of it is synchronous: run it in a thread or in a child process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from batchwright.batches.plan.estimate import Estimate, estimate
from batchwright.batches.plan.formats import explain_format
from batchwright.batches.plan.lines import DEFAULT_ENDPOINT, ENDPOINTS, MIXED, Problem, why_refused
from batchwright.batches.plan.plan import Rules, read
from batchwright.errors import InvalidInput
from batchwright.files.local import require_readable
from batchwright.inference.prices import Price

_BOM = b"\xef\xbb\xbf"
_LINE_BYTES_MAX = 16 * 1024 * 1024
_SHOWN_CHARACTERS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found in a file."""

    endpoint: str
    requests: int
    urls: Mapping[str, int]
    """Requests by the url that they go to."""
    rejected: int
    """Requests for models without a gateway: they will fail."""
    problems: Sequence[Problem]
    """The first problems."""
    problems_total: int
    estimates: Sequence[Estimate]
    output_tokens: int
    """Assumed for each answer."""


class _Url(msgspec.Struct):
    """The field of a line that says where it goes; the decoder skips all others."""

    url: str | None = None


_line = msgspec.json.Decoder(_Url)


def inspect(file: Path, rules: Rules, prices: Mapping[str, Price], output_tokens: int) -> Inspection:
    draft = read(file, rules)
    return Inspection(
        endpoint=rules.endpoint,
        requests=draft.line_count,
        urls=dict(draft.urls),
        rejected=len(draft.rejected),
        problems=draft.problems.kept,
        problems_total=draft.problems.total,
        estimates=estimate(draft, prices, output_tokens=output_tokens),
        output_tokens=output_tokens,
    )


def find_endpoint(file: Path, named: str | None) -> str:
    """The one that was named, or the one that all requests have, or `MIXED`; chat completions if none is known.

    A file of another format is refused here, in one sentence.
    """
    if (format := explain_format(require_readable(file))) is not None:
        raise InvalidInput(format)
    if named is not None:
        if named not in ENDPOINTS:
            raise InvalidInput(f"--endpoint {why_refused(named)}")
        return named
    found: str | None = None
    refused: str | None = None
    with file.open("rb") as lines:
        while line := lines.readline(_LINE_BYTES_MAX):
            url = _read_url(line.removeprefix(_BOM))
            if url in ENDPOINTS and url != found:
                if found is not None:
                    return MIXED
                found = url
            elif url not in ENDPOINTS:
                refused = refused or url
    if found is None and refused is not None:  # reported once, not for every line
        raise InvalidInput(f"{file}: {why_refused(refused[:_SHOWN_CHARACTERS_MAX])}")
    return found or DEFAULT_ENDPOINT


def _read_url(line: bytes) -> str | None:
    """None for an unreadable line: the check of the lines reports what is wrong."""
    try:
        return _line.decode(line).url
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
