"""The judge must find every kind of breach: here each promise about a failover is broken on purpose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from uuid import UUID

import pytest

from batchwright.batches.journal.journal import Journal, LineStatus
from batchwright.db.check import Finding, Level
from batchwright.states import BatchStatus
from tests.chaos.batch_client import Found
from tests.chaos.failover_stage import Ledger
from tests.chaos.failover_verdict import Evidence, Known, Segment, Start, judge, losses, read_journals
from tests.chaos.history import Event, History
from tests.chaos.test_batch_verdict import BATCH, REQUESTS, line
from tests.chaos.test_verdict import job, told

A, B = UUID(int=1), UUID(int=2)
SHARD = UUID(int=3)
HOSTS = {"folder-a": "machine-a", "folder-b": "machine-b"}
FIRST = Segment(shard=0, claim=1, host="folder-a", start=0, end=100, lines=3, at=1.0)
SECOND = Segment(shard=0, claim=1, host="folder-a", start=100, end=200, lines=2, at=2.0)


def test_a_clean_round_is_no_breach():
    assert breaches(evidence()) == {}


def test_a_batch_that_ended_otherwise_is_seen():
    assert "batches that ended otherwise" in breaches(evidence(status="failed"))
    assert "batches that ended otherwise" in breaches(evidence(), wanted=BatchStatus.CANCELLED)


def test_an_answer_in_a_journal_that_is_not_in_the_output_file_is_seen():
    found = breaches(evidence(output=[0, 1, 2], errors=[3, 4]))
    assert found["answers lost from the files"] == [
        ("line-4", "is not in the output file, but its answer is in machine-a: 0.1.seg")
    ]


def test_answers_that_a_cancelled_batch_has_lost_are_seen_and_lines_without_one_may_be_among_the_errors():
    cancelled = evidence(status="cancelled", output=[0, 1], errors=[2, 3, 4])
    found = breaches(replace(cancelled, journaled={0: "a", 100: "a"}), wanted=BatchStatus.CANCELLED)
    assert found == {}
    found = breaches(replace(cancelled, journaled={0: "a", 100: "a", 200: "b"}), wanted=BatchStatus.CANCELLED)
    assert list(found) == ["answers lost from the files"]


def test_lines_that_are_gone_doubled_or_in_the_wrong_file_are_seen():
    assert "lines in neither file" in breaches(evidence(output=[0, 1, 2]))
    assert "lines doubled" in breaches(evidence(output=[0, 1, 1, 2, 4]))
    assert "lines in the wrong file" in breaches(evidence(output=[0, 1, 2], errors=[3, 4]))


def test_a_file_that_does_not_fit_its_manifest_and_a_batch_without_one_are_seen():
    for findings in ([], [Finding("output", Level.ERROR, "has another checksum")]):
        found = breaches(replace(evidence(), findings=findings))
        assert list(found) == ["files that do not fit their manifest"]


def test_a_lost_job_is_a_breach_unless_it_was_answered_while_commits_were_held_back():
    ledger = Ledger(enqueued={A: 1.0, B: 5.0}, held_at=3.0)
    round = replace(evidence(), ledger=ledger)
    assert breaches(round, is_lossless=False) == {}
    assert list(breaches(round, is_lossless=True)) == ["jobs lost"]
    early = replace(round, ledger=replace(ledger, held_at=6.0))
    assert list(breaches(early, is_lossless=False)) == ["jobs lost"]


def test_a_job_that_is_stuck_or_failed_is_seen():
    for status in ("RUNNING", "FAILED"):
        round = replace(evidence(), history=History({A: job(A, status=status)}, told(A), Counter()))
        assert "jobs stuck, or failed" in breaches(round)


@pytest.mark.parametrize("effects", [0, 2])
def test_a_doubled_and_a_missing_effect_are_seen(effects):
    history = History({A: job(A, job_type="chaos.write")}, told(A), Counter({A: effects}))
    assert list(breaches(replace(evidence(), history=history))) == ["write= effects doubled, missing or of nobody"]


def test_a_journal_counts_up_to_its_last_whole_record_and_with_its_answers_only(tmp_path):
    folder = tmp_path / BATCH
    folder.mkdir()
    journal = Journal(folder / "0.1.seg")
    journal.append(0, LineStatus.OK, b"{}\n")
    journal.append(100, LineStatus.CANCELLED, line(REQUESTS[1], status=400))
    journal.append(200, LineStatus.OK, b"{}\n")
    journal.close()
    with journal.path.open("r+b") as file:
        file.truncate(journal.size - 1)
    assert read_journals({"machine-a": tmp_path, "machine-b": tmp_path / "none"}, BATCH) == {0: "machine-a: 0.1.seg"}


# What was lost ----------------------------------------------------------------------------------------------------


def test_segments_claims_and_jobs_that_a_failover_took_away_are_counted():
    kept = {(SHARD, 1): start("machine-a:7:x")}
    before = Known(
        claims={**kept, (SHARD, 2): start("machine-a:7:x"), (A, 1): start("machine-a:7:x", "chaos.write")},
        ended={A: 4.0},
        segments={FIRST, SECOND},
    )
    after = Known(
        claims={**kept, (SHARD, 2): start("machine-b:8:y"), (A, 1): start("machine-b:8:y", "chaos.write")},
        ended={A: 9.0},
        segments={FIRST, SECOND._replace(at=8.0)},
    )
    shard = job(SHARD, job_type="batch.shard", payload={"number": 0})
    history = History({A: job(A), SHARD: shard}, told(A), Counter())
    ledger = Ledger(enqueued={A: 1.0, B: 2.0})
    counted = losses(replace(evidence(), before=before, after=after, history=history, ledger=ledger), HOSTS)
    assert counted == {
        "segments lost": 1,
        "answers in them": 2,
        "claims lost": 2,
        "of these of shards": 1,
        "claim numbers given twice": 2,
        "of these of shards, to another worker": 1,
        "settled by another than the holder": 0,
        "segments of another than the holder": 0,
        "lines registered twice": 0,
        "jobs enqueued": 2,
        "jobs lost": 1,
        "jobs ended twice": 1,
    }


def test_what_two_holders_of_one_claim_number_do_is_counted():
    shard = job(SHARD, job_type="batch.shard", payload={"number": 0})
    events = [
        Event(1, SHARD, 1.0, "job.started", "RUNNING", 1, 1, "machine-b:8:y"),
        Event(2, SHARD, 2.0, "job.succeeded", "SUCCEEDED", 1, 1, "machine-a:7:x"),
    ]
    after = Known(claims={(SHARD, 1): start("machine-b:8:y")}, segments={FIRST, SECOND._replace(host="folder-b")})
    round = replace(evidence(), history=History({SHARD: shard}, events, Counter()), after=after)
    counted = losses(round, HOSTS)
    assert counted["settled by another than the holder"] == 1
    assert counted["segments of another than the holder"] == 1


def start(worker, job_type="batch.shard"):
    return Start(worker, 1.0, job_type)


def evidence(*, status="completed", output=(0, 1, 2, 4), errors=(3,)):
    """A batch of five lines, of which one was made to fail; all others have their answers in a journal."""
    return Evidence(
        requests=REQUESTS,
        found=Found(
            output=b"".join(line(REQUESTS[n]) for n in output),
            errors=b"".join(line(REQUESTS[n], status=400) for n in errors),
        ),
        row={"id": BATCH, "status": status, "errors": None},
        findings=[Finding("output", Level.OK, "as it should be")],
        journaled={100 * n: "machine-a: 0.1.seg" for n in (0, 1, 2, 4)},
        history=History({A: job(A)}, told(A), Counter()),
        ledger=Ledger(),
        before=Known(),
        after=Known(),
    )


def breaches(evidence, *, wanted=BatchStatus.COMPLETED, is_lossless=False):
    return {name: found for name, found in judge(evidence, wanted=wanted, is_lossless=is_lossless).items() if found}
