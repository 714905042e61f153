"""From an input file to a plan: one pass that checks every line, then the order, then the files.

    read(file, rules) → Draft(problems, models) → write(draft, folder) → model_map.json, plans/*.plan

Bodies are not kept in memory: a request needs its plan entry, eight bytes per 256 of its prompt, and a digest of its
custom_id.
All of it is synchronous: run it in a thread or in a child process.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
from xxhash import xxh3_128_digest

from batchwright.batches.plan.lines import BadLine, GoodLine, LineCheck, Problem
from batchwright.batches.plan.order import BLOCK_BYTES, chain, order
from batchwright.batches.plan.planfile import (
    MODEL_MAP,
    PLANS,
    REJECTED,
    Entry,
    pack_entries,
    plan_path,
    safe_name,
    sync_folder,
    write_file,
)
from batchwright.batches.plan.shards import ProviderPlan
from batchwright.errors import ConfigurationError
from batchwright.private import make_folders

TOKEN_BYTES = 4  # a rule of thumb for English; estimates only

_BOM = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1024 * 1024
_LENGTH_MAX = 2**32 - 1
_LINES_PER_REQUEST_MAX = 10  # or 200 MB of newlines would keep a worker busy for a minute


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """How large an input file may be; the defaults are OpenAI's."""

    bytes_max: int = 209_715_200
    """Bytes of the whole file."""
    embedding_inputs_max: int = 50_000
    """Texts to embed, summed over all lines."""
    line_bytes_max: int = 16 * 1024 * 1024
    """Bytes of one line, its newline not counted; longer ones are refused without being kept in memory."""
    models_max: int = 64
    """Models in one file, each with a plan and shards of its own."""
    problems_kept: int = 1000
    """Number of problems that are kept in full; all are counted."""
    requests_max: int = 50_000
    """Lines that are not blank; reading stops at the first one beyond. Including blank lines, ten times as many."""

    def __post_init__(self) -> None:
        if not 0 < self.line_bytes_max <= _LENGTH_MAX:
            raise ConfigurationError(
                f"line_bytes_max is {self.line_bytes_max}: write a number of bytes from 1 to {_LENGTH_MAX}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What one batch allows; `models` are those with a gateway, or None if one gateway serves every model."""

    endpoint: str
    limits: InputLimits = field(default_factory=InputLimits)
    models: frozenset[str] | None = None
    only: frozenset[bytes] | None = None
    """Plan only the lines with these digests of their custom_ids; all of them are checked."""
    providers: Mapping[str, ProviderPlan] = field(default_factory=dict)
    """Models whose requests go to an outside provider."""


class Problems:
    """The first problems in full, and the number of all: `errors.data` and `errors.total` of a batch."""

    def __init__(self, kept_max: int) -> None:
        self.kept: list[Problem] = []
        self.kept_max = kept_max
        self.total = 0

    def add(self, problem: Problem) -> None:
        self.total += 1
        if len(self.kept) < self.kept_max:
            self.kept.append(problem)

    def as_json(self) -> dict[str, Any]:
        return {"object": "list", "data": [problem.as_json() for problem in self.kept], "total": self.total}


class ModelDraft:
    """The requests of one model, in input order."""

    def __init__(self) -> None:
        self.offsets = array("q")
        self.lengths = array("I")
        self.chains: list[bytes] = []
        self.prompt_bytes = 0
        self.silent = 0
        """Requests whose answers have no tokens, such as embeddings."""
        self.maxima = array("q")
        """Maximum tokens of the other answers, for requests that set one."""

    def add(self, offset: int, length: int, request: GoodLine, chained: bytes) -> None:
        self.offsets.append(offset)
        self.lengths.append(length)
        self.chains.append(chained)
        self.prompt_bytes += len(request.prompt) + request.repeated_bytes
        if not request.endpoint.has_output:
            self.silent += 1
        elif request.output_tokens_max is not None:
            self.maxima.append(request.output_tokens_max)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """One model's requests in the order in which to send them, and what is known about them beforehand."""

    bytes: int
    entries: list[Entry]
    groups: int
    prompt_tokens: int
    shared_tokens: int

    def as_json(self) -> dict[str, int]:
        return {
            "bytes": self.bytes,
            "groups": self.groups,
            "prompt_tokens_estimate": self.prompt_tokens,
            "requests": len(self.entries),
            "shared_tokens_estimate": self.shared_tokens,
        }


@dataclass(kw_only=True, slots=True)
class Draft:
    """What one pass over the file found; a plan can be written if there is no problem."""

    problems: Problems
    inputs: int = 0
    line_count: int = 0
    models: dict[str, ModelDraft] = field(default_factory=dict)
    urls: Counter[str] = field(default_factory=Counter)
    """Requests by the url that they go to."""
    rejected: list[Entry] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of lines of the batch."""
        return len(self.rejected) + sum(len(model.offsets) for model in self.models.values())

    def plan(self, model: str) -> ModelPlan:
        """Deterministic: the same file gives the same entries."""
        return arrange(self.models[model])


class _Line(NamedTuple):
    number: int
    offset: int
    length: int
    data: bytes | None  # empty for a blank line, None for a line that is too long


def digest_of(custom_id: str) -> bytes:
    return xxh3_128_digest(custom_id.encode())


def read(file: Path, rules: Rules) -> Draft:
    """Check every line of a file; reading it changes nothing on the disk."""
    limits = rules.limits
    draft = Draft(problems=Problems(limits.problems_kept))
    with file.open("rb", buffering=_BUFFER_BYTES) as opened:
        if os.fstat(opened.fileno()).st_size > limits.bytes_max:
            draft.problems.add(_file_size_problem(limits.bytes_max))
            return draft
        _Pass(rules, draft).run(_lines(opened, limits.line_bytes_max))
    return draft


def write(draft: Draft, folder: Path, providers: Mapping[str, ProviderPlan] | None = None) -> dict[str, ModelPlan]:
    """Order each model's requests and write the plan; returns it by model. The model map comes last."""
    assert draft.problems.total == 0, "a file with problems has no plan"
    make_folders(folder / PLANS)
    plans = {}
    for model in draft.models:
        plans[model] = draft.plan(model)
        write_file(plan_path(folder, safe_name(model)), pack_entries(plans[model].entries))
    write_file(folder / REJECTED, pack_entries(draft.rejected))
    sync_folder(folder / PLANS)
    document = model_map(draft, plans)
    if there := {model: asdict(one) for model, one in (providers or {}).items() if model in plans}:
        document["providers"] = there
    write_file(folder / MODEL_MAP, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    sync_folder(folder)
    return plans


def model_map(draft: Draft, plans: dict[str, ModelPlan]) -> dict[str, Any]:
    """The file names of models, the numbers of lines in all and without a gateway, and what each plan holds."""
    names = {model: safe_name(model) for model in plans}
    return {
        "model_to_safe": names,
        "safe_to_model": {safe: model for model, safe in names.items()},
        "line_count": draft.line_count,
        "rejected_count": len(draft.rejected),
        "models": {model: plan.as_json() for model, plan in plans.items()},
    }


def arrange(draft: ModelDraft) -> ModelPlan:
    """One model's requests, ordered and grouped."""
    ordered = order(draft.chains)
    entries = [
        Entry(draft.offsets[position], draft.lengths[position], group)
        for position, group in zip(ordered.positions, ordered.groups, strict=True)
    ]
    return ModelPlan(
        bytes=sum(draft.lengths),
        entries=entries,
        groups=max(ordered.groups, default=0),
        prompt_tokens=draft.prompt_bytes // TOKEN_BYTES,
        shared_tokens=sum(ordered.shared) * BLOCK_BYTES // TOKEN_BYTES,
    )


class _Pass:
    """The one pass over a file."""

    def __init__(self, rules: Rules, draft: Draft) -> None:
        self.rules = rules
        self.limits = rules.limits
        self.draft = draft
        self.problems = draft.problems
        self.lines = LineCheck(rules.endpoint)
        self.lines_max = _LINES_PER_REQUEST_MAX * rules.limits.requests_max
        self.seen: set[bytes] = set()
        self.models_refused = False

    def run(self, lines: Iterable[_Line]) -> None:
        for line in lines:
            if line.number > self.lines_max:
                self.problems.add(_lines_problem(self.lines_max))
                return
            if line.data == b"":
                continue
            if self.draft.line_count == self.limits.requests_max:
                self.problems.add(_requests_problem(self.limits.requests_max))
                return
            self.draft.line_count += 1
            self._take(line)
        if self.draft.line_count == 0:
            self.problems.add(_empty_file_problem())
        if self.draft.inputs > self.limits.embedding_inputs_max:
            self.problems.add(_inputs_problem(self.draft.inputs, self.limits.embedding_inputs_max))

    def _take(self, line: _Line) -> None:
        if line.data is None:
            self.problems.add(_line_length_problem(line.number, self.limits.line_bytes_max))
            return
        found = self.lines.check(line.data, line.number)
        if isinstance(found, BadLine):
            for problem in found.problems:
                self.problems.add(problem)
            if found.custom_id is not None:
                self._remember(found.custom_id, line.number)
        elif self._remember(found.custom_id, line.number) and self._is_wanted(found.custom_id):
            self._place(line, found)

    def _is_wanted(self, custom_id: str) -> bool:
        return self.rules.only is None or digest_of(custom_id) in self.rules.only

    def _remember(self, custom_id: str, number: int) -> bool:
        """False for a duplicate. Digests are kept, because 50,000 ids of 512 bytes would need too much memory."""
        digest = digest_of(custom_id)
        if digest in self.seen:
            self.problems.add(_duplicate_problem(custom_id, number))
            return False
        self.seen.add(digest)
        return True

    def _place(self, line: _Line, request: GoodLine) -> None:
        self.draft.inputs += request.inputs
        self.draft.urls[request.url] += 1
        if self.rules.models is not None and request.model not in self.rules.models:
            self.draft.rejected.append(Entry(line.offset, line.length, 0))
            return
        draft = self.draft.models.get(request.model) or self._open(request.model, line.number)
        if draft is not None:
            chained = chain(request.prompt) if request.endpoint.is_ordered else b""
            draft.add(line.offset, line.length, request, chained)

    def _open(self, model: str, number: int) -> ModelDraft | None:
        if len(self.draft.models) < self.limits.models_max:
            return self.draft.models.setdefault(model, ModelDraft())
        if not self.models_refused:
            self.problems.add(_models_problem(model, number, self.limits.models_max))
            self.models_refused = True
        return None


def _lines(file: BinaryIO, bytes_max: int) -> Iterator[_Line]:
    """Every line of the file, including blank ones. A byte order mark is not part of the first."""
    offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(offset)
    number = 0
    while data := file.readline(bytes_max + 1):
        number += 1
        length = len(data) - data.endswith(b"\n")
        if length > bytes_max:
            yield _Line(number, offset, length, None)
            offset += len(data) + _skip_rest(file)
            continue
        yield _Line(number, offset, length, b"" if data.isspace() else data)
        offset += len(data)


def _skip_rest(file: BinaryIO) -> int:
    skipped = 0
    while rest := file.readline(_BUFFER_BYTES):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _duplicate_problem(custom_id: str, number: int) -> Problem:
    message = (
        f"The custom_id '{custom_id}' for this request is a duplicate of another request. "
        "The custom_id parameter must be unique for each request in a batch."
    )
    return Problem(code="duplicate_custom_id", line=number, message=message, param="custom_id")


def _empty_file_problem() -> Problem:
    message = "The input file is empty. Please ensure that the batch contains at least one request."
    return Problem(code="empty_file", line=None, message=message)


def _file_size_problem(bytes_max: int) -> Problem:
    message = (
        f"The batch input file is larger than the {bytes_max} bytes maximum. Please try again with a smaller batch."
    )
    return Problem(code="file_too_large", line=None, message=message)


def _line_length_problem(number: int, bytes_max: int) -> Problem:
    return Problem(
        code="line_too_long", line=number, message=f"This line is longer than the {bytes_max} bytes maximum."
    )


def _inputs_problem(count: int, inputs_max: int) -> Problem:
    message = f"The batch has {count} embedding inputs across all requests, more than the {inputs_max} maximum."
    return Problem(code="too_many_inputs", line=None, message=message, param="body.input")


def _lines_problem(lines_max: int) -> Problem:
    message = f"The batch input file has more than {lines_max} lines, most of them blank. Remove the blank ones."
    return Problem(code="too_many_lines", line=None, message=message)


def _models_problem(model: str, number: int, models_max: int) -> Problem:
    message = f"The model '{model}' is one more than the {models_max} different models that a batch may have."
    return Problem(code="too_many_models", line=number, message=message, param="body.model")


def _requests_problem(requests_max: int) -> Problem:
    message = f"The batch has more than the {requests_max} requests maximum. Lines after that were not checked."
    return Problem(code="too_many_tasks", line=None, message=message)
