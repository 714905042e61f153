"""`batchwright batch check`: what is wrong with an input file, and what it will take, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from batchwright.batches.commands.show import print_problems
from batchwright.batches.plan.estimate import Estimate, estimate, output_tokens_max, total_cost
from batchwright.batches.plan.inspect import find_endpoint
from batchwright.batches.plan.lines import MIXED
from batchwright.batches.plan.plan import TOKEN_BYTES, Draft, Rules, read
from batchwright.batches.settings import BatchSettings
from batchwright.cli.flags import Config, Json, settings_from
from batchwright.cli.show import as_dict, money, number, print_json, print_table, print_text, size
from batchwright.files.local import require_readable
from batchwright.settings import Settings

InputFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Requests, one JSON object per line.", show_default=False)
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Endpoint of all requests, such as /v1/embeddings; by default each request goes where its line says.",
        show_default=False,
    ),
]


def check(
    file: InputFile,
    endpoint: Endpoint = None,
    output_tokens: Annotated[int, typer.Option(min=0, help="Assumed number of tokens per answer.")] = 250,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of problems to show; all are counted.")
    ] = 1000,
    json: Json = False,
    config: Config = None,
) -> None:
    """Check an input file without sending anything: every problem, and an estimate of tokens and cost.

    Needs no database. The exit code is 0 if the file can be run, and 1 if there are problems.
    """
    settings = settings_from(None, config)
    where = find_endpoint(file, endpoint)
    draft = read_draft(file, where, settings, limit)
    estimates = estimate(draft, settings.table("batches", BatchSettings).prices, output_tokens=output_tokens)
    if json:
        print_json(_as_json(where, draft, estimates, output_tokens))
    else:
        _print(file, where, draft, estimates, output_tokens, limit)
    if draft.problems.total:
        raise typer.Exit(1)


def read_draft(file: Path, endpoint: str, settings: Settings, problems_kept: int) -> Draft:
    models = frozenset(settings.model_gateways) or None
    limits = replace(settings.table("batches", BatchSettings).limits, problems_kept=problems_kept)
    return read(require_readable(file), Rules(endpoint=endpoint, limits=limits, models=models))


def _as_json(endpoint: str, draft: Draft, estimates: Sequence[Estimate], output_tokens: int) -> dict[str, Any]:
    costs = total_cost(list(estimates))
    has_output = any(one.written for one in estimates)
    return {
        "endpoint": endpoint,
        "endpoints": dict(draft.urls),
        "requests": draft.line_count,
        "rejected": len(draft.rejected),
        "problems": draft.problems.as_json(),
        "models": [as_dict(one) for one in estimates],
        "prompt_tokens": sum(one.prompt_tokens for one in estimates),
        "shared_tokens": sum(one.shared_tokens for one in estimates),
        "output_tokens": sum(one.output_tokens for one in estimates),
        "output_tokens_max": output_tokens_max(estimates),
        "assumptions": {
            "prompt_bytes_per_token": TOKEN_BYTES,
            "output_tokens_per_answer": output_tokens if has_output else None,
        },
        "cost": None if costs is None else costs[1],
        "cost_cached": None if costs is None else costs[0],
    }


def _print(
    file: Path, endpoint: str, draft: Draft, estimates: Sequence[Estimate], output_tokens: int, limit: int
) -> None:
    print_problems([problem.as_json() for problem in draft.problems.kept], draft.problems.total, limit)
    if estimates:
        _print_models(estimates)
        print_text(Text(_assumptions(estimates, output_tokens), "dim"))
    if draft.rejected:
        text = f"! {number(len(draft.rejected))} requests are for models without a gateway: they will fail"
        print_text(Text(text, "yellow"))
    if draft.problems.total:
        found = f"{_count(draft.problems.total, 'problem')} in {_count(draft.line_count, 'request')}"
        print_text(Text(f"✗ {file}: {found}; the batch would be refused", "bold red"))
        return
    print_text(Text.assemble(("✓ ", "bold green"), _conclusion(file, endpoint, draft, estimates)))


def _count(n: int, noun: str) -> str:
    return f"{number(n)} {noun}{'' if n == 1 else 's'}"


def _print_models(estimates: Sequence[Estimate]) -> None:
    print_table(
        {
            "model": [Text(one.model) for one in estimates],
            "requests": [Text(number(one.requests)) for one in estimates],
            "size": [Text(size(one.bytes)) for one in estimates],
            "prompt tokens": [Text(estimate_text(one.prompt_tokens)) for one in estimates],
            "shared": [Text(f"{_fraction(one.shared_tokens, one.prompt_tokens):.0%}") for one in estimates],
            "answer tokens": [Text(estimate_text(one.output_tokens) if one.output_tokens else "") for one in estimates],
            "cost": [Text("" if one.cost is None else money(one.cost)) for one in estimates],
        },
        elastic=("model",),
    )


def _assumptions(estimates: Sequence[Estimate], output_tokens: int) -> str:
    """What is known only after the answers have arrived."""
    parts = [f"assumed: {TOKEN_BYTES} bytes of a prompt per token"]
    written, bounded = sum(one.written for one in estimates), sum(one.bounded for one in estimates)
    if written:
        parts.append(f"an answer has {number(output_tokens)} tokens (--output-tokens)")
    if bounded:
        parts[-1] += f", or its maximum if that is less: {number(bounded)} of {number(written)} requests have one"
    if bounded and (most := output_tokens_max(estimates)) is not None:
        parts[-1] += f", which allows {number(most)} answer tokens at most"
    return "; ".join(parts)


def _conclusion(file: Path, endpoint: str, draft: Draft, estimates: Sequence[Estimate]) -> str:
    prompt, shared = sum(one.prompt_tokens for one in estimates), sum(one.shared_tokens for one in estimates)
    parts = [
        f"{_count(draft.line_count, 'request')} to {_endpoints_text(endpoint, draft)}",
        f"{estimate_text(prompt)} prompt tokens",
    ]
    if shared:
        parts.append(f"{_fraction(shared, prompt):.0%} of them in shared prefixes that a prefix cache can save")
    if (costs := total_cost(list(estimates))) is not None:
        cached = f", {money(costs[0])} if the cache saves all of that" if costs[0] < costs[1] else ""
        parts.append(f"cost about {money(costs[1])}{cached}")
    return f"{file} can be run: {'; '.join(parts)}"


def _endpoints_text(endpoint: str, draft: Draft) -> str:
    if endpoint != MIXED:
        return endpoint
    return ", ".join(f"{url} ({number(count)})" for url, count in sorted(draft.urls.items()))


def estimate_text(n: int) -> str:
    """An estimate with two digits that count: more would look like knowledge."""
    digits = len(str(n)) - 2
    return f"about {number(round(n, -digits) if digits > 0 else n)}"


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
