"""The judge of the batch chaos: compares what a batch promises with its files, its rows and its journals.

A check yields one `(what, what is wrong)` for each breach; a good run has none.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
import psycopg
from psycopg.rows import dict_row

from batchwright.batches.journal.envelopes import RequestIds
from batchwright.batches.journal.journal import scan
from batchwright.states import BatchStatus
from tests.chaos.batch_client import Found, Request
from tests.chaos.batch_fleet import Fleet, Monkey, Span, Victim, overlaps, pid_of
from tests.chaos.history import TERMINAL, Event, History, read_history
from tests.chaos.verdict import Breach, replay

Kind = Literal["plain", "alone", "in line", "nobody", "restart"]
KINDS: dict[Kind, str] = {
    "plain": "",
    "alone": " alone, as suspects",
    "in line": ", behind other shards of their model",
    "nobody": ", no other worker was awake",
    "restart": ", PostgreSQL was killed as well",
}
_ROW = """
SELECT id, status::text, total, completed, failed, expired, cancelled, input_tokens, output_tokens, manifest
FROM batchwright.batch
"""
_SEGMENTS = "SELECT shard, claim, seq, start_byte, end_byte, lines FROM batchwright.batch_segment ORDER BY id"


@dataclass(frozen=True, slots=True)
class Segment:
    """A registered range of a journal, and the offsets of the lines in it."""

    name: str
    lines: int
    offsets: Sequence[int]


@dataclass(slots=True)
class Evidence:
    """Everything that is known after a run."""

    requests: Sequence[Request]
    found: Found
    row: Mapping[str, Any]
    segments: Sequence[Segment]
    history: History


def read_evidence(url: str, work: Path, requests: Sequence[Request], found: Found) -> Evidence:
    with psycopg.connect(url) as connection:
        rows = connection.cursor(row_factory=dict_row).execute(_ROW).fetchall()
        ranges = connection.execute(_SEGMENTS).fetchall()
    row = rows[0] if rows else {}
    segments = [
        Segment(
            f"{shard}.{claim}.{seq}",
            lines,
            [one.offset for one in scan(work / row["id"] / f"{shard}.{claim}.seg", start, end, verify=True)],
        )
        for shard, claim, seq, start, end, lines in ranges
    ]
    return Evidence(requests, found, row, segments, read_history(url, has_effects=False))


def judge(evidence: Evidence) -> dict[str, list[Breach]]:
    """All breaches by the name of the promise."""
    output, errors = read_lines(evidence.found.output), read_lines(evidence.found.errors)
    replays = [replay(evidence.history.of_job[job.id], job) for job in evidence.history.jobs.values()]
    return {
        "batches not completed": list(not_completed(evidence)),
        "lines lost": list(lost(evidence, output, errors)),
        "lines doubled": list(doubled(output, errors)),
        "lines in the wrong file": list(misplaced(evidence, output, errors)),
        "lines out of the input's order": [*out_of_order(evidence, output), *out_of_order(evidence, errors)],
        "answers of another request": list(mixed_up(evidence, [*output, *errors])),
        "counts that differ": list(miscounted(evidence, output, errors)),
        "checksums that differ": list(altered(evidence)),
        "lines that the cursor showed twice, otherwise or not": list(misread(evidence)),
        "lines registered twice: a zombie's": list(registered_twice(evidence)),
        "zombie writes accepted": [breach for one in replays for breach in one.zombies],
        "histories that are no legal path to their row": [breach for one in replays for breach in one.illegal],
        "jobs not terminal, or failed": list(unfinished(evidence.history)),
        "files or batches made twice": list(made_twice(evidence)),
        "answers that nobody should get": evidence.found.breaches,
    }


# Promises ---------------------------------------------------------------------------------------------------------


def not_completed(evidence: Evidence) -> Iterator[Breach]:
    if evidence.row.get("status") != BatchStatus.COMPLETED:
        yield evidence.row.get("id", "no batch"), f"is {evidence.row.get('status')}: {evidence.found.batch}"


def lost(evidence: Evidence, *files: Sequence[Mapping[str, Any]]) -> Iterator[Breach]:
    there = {line["custom_id"] for lines in files for line in lines}
    for request in evidence.requests:
        if request.custom_id not in there:
            yield request.custom_id, "is in neither file"


def doubled(*files: Sequence[Mapping[str, Any]]) -> Iterator[Breach]:
    for custom_id, times in Counter(line["custom_id"] for lines in files for line in lines).items():
        if times > 1:
            yield custom_id, f"is there {times} times"


def misplaced(
    evidence: Evidence, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
) -> Iterator[Breach]:
    """Some lines were made to fail; all others must succeed, whatever died meanwhile."""
    fails = {request.custom_id for request in evidence.requests if request.fails}
    for line in output:
        if line["custom_id"] in fails or line["response"]["status_code"] != 200:
            yield line["custom_id"], f"is in the output file: {_short(line)}"
    for line in errors:
        if line["custom_id"] not in fails:
            yield line["custom_id"], f"is in the error file: {_short(line)}"


def out_of_order(evidence: Evidence, lines: Sequence[Mapping[str, Any]]) -> Iterator[Breach]:
    places = {request.custom_id: place for place, request in enumerate(evidence.requests)}
    last = -1
    for line in lines:
        place = places.get(line["custom_id"], -1)
        if place <= last:
            yield line["custom_id"], f"stands behind line {last} of the input"
        last = place


def mixed_up(evidence: Evidence, lines: Iterable[Mapping[str, Any]]) -> Iterator[Breach]:
    """The server repeats the id of the request that it answers, and the model."""
    ids = RequestIds(evidence.row["id"])
    requests = {request.custom_id: request for request in evidence.requests}
    for line in lines:
        request = requests.get(line["custom_id"])
        if request is None:
            yield line["custom_id"], "was never asked"
            continue
        expected, sent = ids.in_files(request.offset), ids.on_the_wire(request.offset)
        response = line["response"] or {}
        model = response.get("body", {}).get("model", request.model)
        known = response.get("request_id", sent)  # the server's id, or the line's own if it sent none
        if (line["id"], known in (sent, expected), model) != (expected, True, request.model):
            yield line["custom_id"], f"is not {expected} of {request.model}: {_short(line)}"


def miscounted(
    evidence: Evidence, output: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
) -> Iterator[Breach]:
    """The row, the manifest and what users see agree with the files, to the last token."""
    counts = {"total": len(evidence.requests), "completed": len(output), "failed": len(errors)}
    none = {"expired": 0, "cancelled": 0}
    usage = [line["response"]["body"]["usage"] for line in output]
    tokens = {
        "input_tokens": sum(one["prompt_tokens"] for one in usage),
        "output_tokens": sum(one["completion_tokens"] for one in usage),
    }
    found = evidence.found
    said: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("the row", evidence.row, {**counts, **none, **tokens}),
        ("the manifest", found.manifest.get("counts", {}), {**counts, **none}),
        ("the batch", found.batch.get("request_counts", {}), counts),
        ("its usage", found.batch.get("usage") or {}, tokens),
    ]
    for who, has, wanted in said:
        for name, value in wanted.items():
            if has.get(name) != value:
                yield who, f"says {name} {has.get(name)}, but it is {value}"


def altered(evidence: Evidence) -> Iterator[Breach]:
    said = evidence.found.manifest.get("sha256", {})
    for name, data in (("output", evidence.found.output), ("errors", evidence.found.errors)):
        found = hashlib.sha256(data).hexdigest() if data else None
        if said.get(name) != found:
            yield name, f"has {found}, and the manifest says {said.get(name)}"


def misread(evidence: Evidence) -> Iterator[Breach]:
    """While the batch ran, the cursor returned exactly the lines that are in the files now."""
    shown = Counter(evidence.found.shown)
    files = Counter((evidence.found.output + evidence.found.errors).splitlines(keepends=True))
    for line in shown.keys() | files.keys():
        if shown[line] != files[line]:
            yield line[:100].decode(), f"was shown {shown[line]} times, and the files have it {files[line]} times"


def registered_twice(evidence: Evidence) -> Iterator[Breach]:
    """A new owner recovers existing answers, so only a worker that lost its claim could register a line twice."""
    first: dict[int, str] = {}
    for segment in evidence.segments:
        if segment.lines != len(segment.offsets):
            yield segment.name, f"says {segment.lines} lines and has {len(segment.offsets)}"
        for offset in segment.offsets:
            if offset in first:
                yield segment.name, f"has the line at {offset} again, which {first[offset]} has"
            first.setdefault(offset, segment.name)


def unfinished(history: History) -> Iterator[Breach]:
    for job in history.jobs.values():
        if job.status not in TERMINAL or job.locked_by is not None:
            yield job.id, f"{job.job_type} is {job.status}, locked by {job.locked_by}, {job.children_open} open"
        elif job.status != "SUCCEEDED":
            yield job.id, f"{job.job_type} is {job.status}: {job.code}: {job.reason}"


def made_twice(evidence: Evidence) -> Iterator[Breach]:
    for what, count in (("batches", evidence.found.batches), ("files", evidence.found.files)):
        if count != 1:
            yield what, f"there are {count}"


def read_lines(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in data.splitlines()]


def _short(line: Mapping[str, Any]) -> str:
    return orjson.dumps(line)[:200].decode()


# Time to resume ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Resumed:
    """Seconds from the kill of a worker until its work resumed; cases with obstacles are separate, or left out."""

    answered: list[float] = field(default_factory=list)
    """Seconds until the model server answered the next request."""
    rescued: list[float] = field(default_factory=list)
    """Seconds until other workers could claim a shard that it held."""
    started: dict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds until such a shard was started again."""


def resumed(
    history: History, fleet: Fleet, monkey: Monkey, samples: Sequence[tuple[float, int]], lease_seconds: float
) -> Resumed:
    """`samples` are numbers of answers over time.

    No job is rescued in the first lease after the database is available again, so kills at such a time are counted
    separately; and so are those after which no worker was running.
    """
    found = Resumed()
    workers = [one for one in fleet.everybody if one.kind == "worker"]
    killed = {one.process.pid: one for one in workers if one.killed_at is not None}
    outages = [(since, until + lease_seconds) for since, until in monkey.outages]
    for kill in (kill for kill in monkey.kills if kill.pid in killed and kill.phase == "in_progress"):
        until = _next_answer(samples, kill.at)
        if until is not None and _hindrance((kill.at, until), killed[kill.pid], workers, outages) is None:
            found.answered.append(until - kill.at)
    for rescued, again in _rescues(history):
        victim = killed.get(pid_of(rescued.worker))
        if victim is None or victim.killed_at is None or rescued.ts < victim.killed_at:
            continue  # otherwise it was stopped, and killed when others had its shards
        if _hindrance((victim.killed_at, rescued.ts), victim, workers, outages) is None:
            found.rescued.append(rescued.ts - victim.killed_at)
        if again is not None:
            hindrance = _hindrance((victim.killed_at, again.ts), victim, workers, outages)
            found.started[hindrance or _kind(history, rescued, again)].append(again.ts - victim.killed_at)
    return found


def _next_answer(samples: Sequence[tuple[float, int]], after: float) -> float | None:
    """When there were more answers than in the first sample after that moment."""
    later = [(at, answers) for at, answers in samples if at > after]
    return next((at for at, answers in later if answers > later[0][1]), None)


def _rescues(history: History) -> Iterator[tuple[Event, Event | None]]:
    """Each rescue with the next start of that job."""
    for events in list(history.of_job.values()):
        for place, event in enumerate(events):
            if event.event == "job.rescued":
                yield event, next((later for later in events[place:] if later.event == "job.started"), None)


def _hindrance(span: Span, victim: Victim, workers: Sequence[Victim], outages: Sequence[Span]) -> Kind | None:
    if overlaps(span, outages):
        return "restart"
    others = [awake for one in workers if one is not victim for awake in one.awake]
    return None if _is_covered(span, others) else "nobody"


def _is_covered(span: Span, others: Iterable[Span]) -> bool:
    at, end = span
    for since, until in sorted(others):
        if since <= at < until:
            at = until
    return at >= end


def _kind(history: History, rescued: Event, again: Event) -> Kind:
    earlier = [one for one in history.of_job[again.job_id] if one.id < again.id and one.status is not None]
    if [one.event for one in earlier[-4:]] == ["job.started", "job.rescued"] * 2:
        return "alone"
    queue = history.jobs[again.job_id].queue
    neighbours = [job.id for job in history.jobs.values() if job.queue == queue and job.id != again.job_id]
    waited = (rescued.ts, again.ts)
    return "in line" if any(overlaps(waited, _held(history.of_job[id])) for id in neighbours) else "plain"


def _held(events: Sequence[Event]) -> list[Span]:
    """When some worker had this job."""
    moves = [event for event in events if event.status is not None]
    ends = [*(event.ts for event in moves[1:]), float("inf")]
    return [(event.ts, end) for event, end in zip(moves, ends, strict=False) if event.event == "job.started"]
