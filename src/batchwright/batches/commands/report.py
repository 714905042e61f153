"""What `batchwright batch run` says: how a run ended, and which runs of the same file are unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from batchwright.batches.commands.show import (
    COLOURS,
    count_failed,
    exit_code,
    group_errors,
    list_problems,
    print_errors,
    print_problems,
    print_words,
    progress,
    resume_command,
    tokens_text,
)
from batchwright.batches.local import LocalRun
from batchwright.batches.store import Batch
from batchwright.cli.show import money, number, print_facts, print_json, print_text, say, seconds, time_text
from batchwright.cli.targets import Target
from batchwright.inference.prices import Price, cost
from batchwright.states import BatchStatus


class Targets(NamedTuple):
    """Where the answers and the lines that failed go."""

    output: Target
    errors: Target

    @property
    def has_stream(self) -> bool:
        """Whether one of them is standard output."""
        return any(one.stream is not None for one in self)


class Effort(NamedTuple):
    """What this start of the command did; earlier ones, and the time between them, do not count."""

    seconds: float
    answers: int
    before: int
    """Answers that were there when it began."""

    def __str__(self) -> str:
        rate = f"{seconds(self.seconds)}, {self.answers / max(self.seconds, 0.001):,.1f} answers/s"
        return rate if not self.before else f"{rate}; {number(self.before)} answers were there before"


class Report:
    """How a run went, for people or for programs. A family is a batch and those whose failed lines it sends again."""

    def __init__(self, targets: Targets, prices: Mapping[str, Price], *, json: bool) -> None:
        self._targets = targets
        self._prices = prices
        self._json = json
        self.advice: str | None = None
        """What is probably wrong with the server's address or key."""

    def stopped(self, family: Sequence[Batch], code: int) -> None:
        if self._json:
            print_json(self._summarize(family, code, {}))
        elif not family:
            say("stopped before anything was sent")
        else:
            batch = family[0]
            say(f"stopped at {progress(batch) or 'the beginning'}; every answer is kept")
            say(f"  resume:  {resume_command(batch)}")  # 80 columns, so that it can be copied
            say("           or the same command again")
            say(f"  cancel:  batchwright batch cancel {batch.id}")

    def ended(
        self, family: Sequence[Batch], words: Mapping[str, str], effort: Effort | None, *, was_done: bool
    ) -> None:
        """`words` is what the server said, by the codes of errors."""
        if self._json:
            print_json(self._summarize(family, exit_code(family[0]), words))
        else:
            self._print_end(family, words, effort, was_done=was_done)

    def _summarize(self, family: Sequence[Batch], code: int, words: Mapping[str, str]) -> dict[str, Any]:
        batch = family[0] if family else None
        has_files = batch is not None and batch.manifest is not None
        return {
            "id": batch.id if batch else None,
            "status": batch.status if batch else None,
            "exit_code": code,
            "total": family[-1].total if family else 0,
            "completed": sum(one.completed for one in family),
            "failed": count_failed(batch) if batch else 0,
            "error_summary": group_errors(batch, words) if batch else [],
            "problems": list_problems(batch) if batch else [],
            "input_tokens": sum(one.input_tokens for one in family),
            "cached_tokens": sum(one.cached_tokens for one in family),
            "output_tokens": sum(one.output_tokens for one in family),
            "cost": self._cost(family),
            "output": self._targets.output.name if has_files else None,
            "errors": self._targets.errors.name if has_files and batch is not None and batch.error_file_id else None,
        }

    def _cost(self, family: Sequence[Batch]) -> float | None:
        found = [cost(one.usage_by_model, self._prices) for one in family]
        return None if None in found else sum(one or 0.0 for one in found)

    def _print_end(
        self, family: Sequence[Batch], words: Mapping[str, str], effort: Effort | None, *, was_done: bool
    ) -> None:
        batch = family[0]
        if was_done:
            again = "--again sends all of it again" + (", --retry-failed what failed" if count_failed(batch) else "")
            print_text(Text(f"{batch.id} was done already, on {time_text(batch.ended_at)}; {again}"))
        self._print_verdict(family)
        has_files = batch.manifest is not None
        spent = self._cost(family)
        print_facts(
            [
                ("  output", self._targets.output if has_files else None),
                ("  errors", self._targets.errors if has_files and batch.error_file_id else None),
                ("  tokens", tokens_text(*family)),
                ("  cost", money(spent) if spent and has_files else None),
                ("  took", str(effort) if effort is not None else None),
                ("  look", f"batchwright batch show {batch.id}"),
            ]
        )
        print_errors(batch)
        print_words(batch, words)
        if self.advice is not None and not any(one.completed for one in family):
            print_text(Text(f"! {self.advice}", "yellow"))
        print_problems(list_problems(batch), (batch.errors or {}).get("total", 0))

    def _print_verdict(self, family: Sequence[Batch]) -> None:
        batch = family[0]
        completed, total, failed = sum(one.completed for one in family), family[-1].total, count_failed(batch)
        if batch.status is BatchStatus.COMPLETED and failed:
            see = f"see {self._targets.errors}" if batch.error_file_id else f"see batchwright batch show {batch.id}"
            words = (
                f"! completed, {number(failed)} of {number(total)} failed; {see}; "
                "retry with the same command and --retry-failed"
            )
            print_text(Text(words, "bold yellow"))
            return
        words = f"{number(completed)} of {number(total)} lines were answered" if total else "nothing was sent"
        if failed:
            words += f", {number(failed)} failed"
        sign = "✓" if exit_code(batch) == 0 else "✗"
        print_text(Text(f"{sign} {batch.status.value}: {words}", f"bold {COLOURS[batch.status]}"))


def mention_unfinished(run: LocalRun, others: Sequence[Batch], running: set[str]) -> None:
    """Say that runs of the same file have not ended, and what resuming one of them would save."""
    if not others:
        return
    which = "an earlier run of this file is" if len(others) == 1 else f"{len(others)} earlier runs of this file are"
    say(f"note: {which} unfinished; this one is a new batch and sends every line")
    for batch in others:
        say(f"  {batch.id}: {_difference(run, batch)}; {_standing(batch)}")
        if batch.id in running:
            say("    it is still running")
            continue
        say(f"    to resume it{_savings(batch)}:")
        say(f"      {resume_command(batch)}")
        say("    to give it up:")
        say(f"      batchwright batch cancel {batch.id}")


def _difference(run: LocalRun, batch: Batch) -> str:
    origin = batch.origin or {}
    if origin.get("sha256") != run.sha256:
        return f"{run.file} has changed since"
    return ", ".join(
        f"{name} {origin.get(name)}" for name in ("server", "output") if origin.get(name) != getattr(run, name)
    )


def _standing(batch: Batch) -> str:
    return f"{progress(batch)} done" if batch.total else "nothing was sent"


def _savings(batch: Batch) -> str:
    tokens = batch.input_tokens + batch.output_tokens
    if not batch.completed:
        return ""
    return f" (saves {number(batch.completed)} answers{f', {number(tokens)} tokens' if tokens else ''})"
