import asyncio
import errno
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batches.journal.envelopes import MESSAGES, answered, request_id
from batchwright.batches.journal.journal import Journal, scan
from batchwright.batches.journal.segments import Piece
from batchwright.batches.output import assemble as module
from batchwright.batches.output.assemble import Counts, assemble, manifest
from batchwright.batches.plan.planfile import Entry, pack_entries
from batchwright.batches.tally import LineStatus, Tally
from batchwright.errors import Conflict, NotFound, StorageError, StorageUnavailable
from batchwright.inference.answers import Reply, Usage, classify
from batchwright.storage import Store
from batchwright.storage.local import Local

BATCH = "batch_" + "ab" * 16
MIB = 1024 * 1024


def error_summary(tally):
    """The errors by code, the most frequent first."""
    ordered = sorted(tally.errors.items(), key=lambda item: (-item[1][0], item[0]))
    return [{"code": code, "count": count, "sample_custom_id": sample} for code, (count, sample) in ordered]


class Stage:
    """An input of some lines, its plan, and journals; `write` adds a line to a journal and registers it."""

    def __init__(self, folder, lines, rejected=(), plans=1):
        self.folder = Path(folder)
        self.input = self.folder / "input.jsonl"
        self.entries = []
        content = b""
        for number in range(lines):
            line = json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/", "body": {"n": number}}).encode()
            self.entries.append(Entry(len(content), len(line), 0))
            content += line + b"\n\n"
        self.input.write_bytes(content)
        planned = [entry for number, entry in enumerate(self.entries) if number not in rejected]
        self.plans = [self.folder / f"{number}.plan" for number in range(plans)]
        for number, plan in enumerate(self.plans):
            plan.write_bytes(pack_entries(reversed(planned[number::plans])))
        self.rejected = self.folder / "rejected.plan"
        self.rejected.write_bytes(pack_entries(self.entries[number] for number in rejected))
        self.pieces = []

    def write(self, number, status=LineStatus.OK, *, file="1.1", text="hi", usage=None):
        path = self.folder / f"{file}.seg"
        journal = Journal(path)
        start, offset = journal.size, self.entries[number].offset
        journal.append(offset, status, self.line(number, status, text), usage or Usage())
        self.pieces.append(Piece(path, start, journal.size))
        journal.close()

    def line(self, number, status=LineStatus.OK, text="hi"):
        body = b'{"choices": ["%b"]}' if status is LineStatus.OK else b'{"error": {"code": "%b"}}'
        reply = Reply(status=200 if status is LineStatus.OK else 400, body=body % text.encode())
        return answered(request_id(BATCH, self.entries[number].offset), f"c{number}", classify(reply, now=0.0))

    def assemble(self, pieces=None):
        pieces = self.pieces if pieces is None else pieces
        return assemble(BATCH, self.input, plans=self.plans, rejected=self.rejected, pieces=pieces)


async def content(chunks):
    return b"".join([chunk async for chunk in chunks])


def lines_of(chunks):
    return asyncio.run(content(chunks)).splitlines(keepends=True)


def custom_ids(chunks):
    return [json.loads(line)["custom_id"] for line in lines_of(chunks)]


@pytest.fixture
def stage(tmp_path):
    return lambda lines=4, **more: Stage(tmp_path, lines, **more)


def fails(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_files():
    return {file.path for file in psutil.Process().open_files()}


def test_answers_come_in_the_order_of_the_input(stage):
    batch = stage(lines=5, plans=2)
    for number in (3, 0, 4, 1, 2):
        batch.write(number, file=f"{number % 2}.1", text=f"t{number}")
    assembly = batch.assemble()
    assert lines_of(assembly.output()) == [batch.line(number, text=f"t{number}") for number in range(5)]
    assert assembly.counts == Counts(ok=5, failed=0, expired=0, cancelled=0, total=5)
    assert (assembly.has_output, assembly.has_errors, assembly.missing) == (True, False, 0)
    assert lines_of(assembly.errors()) == []


def test_a_batch_without_a_success_has_no_output(stage):
    batch = stage(lines=2)
    batch.write(1, LineStatus.FAILED, text="bad")
    batch.write(0, LineStatus.FAILED, text="worse")
    assembly = batch.assemble()
    assert (assembly.has_output, assembly.has_errors) == (False, True)
    assert lines_of(assembly.errors()) == [
        batch.line(0, LineStatus.FAILED, "worse"),
        batch.line(1, LineStatus.FAILED, "bad"),
    ]
    assert assembly.counts == Counts(0, 2, 0, 0, 2)
    assert assembly.counts.as_json() == {"total": 2, "completed": 0, "failed": 2, "expired": 0, "cancelled": 0}


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("batch_expired", Counts(1, 1, 2, 0, 4)),
        ("batch_cancelled", Counts(1, 1, 0, 2, 4)),
        ("batch_failed", Counts(1, 3, 0, 0, 4)),
    ],
)
def test_lines_without_an_answer_become_error_lines(stage, code, counts):
    batch = stage(lines=4)
    batch.write(2)
    batch.write(1, LineStatus.FAILED)
    assembly = batch.assemble()
    assert assembly.missing == 2
    assembly.fill(code)
    assert assembly.missing == 2
    assert assembly.counts == counts
    assert lines_of(assembly.output()) == [batch.line(2)]
    first, second, third = map(json.loads, lines_of(assembly.errors()))
    assert [first["custom_id"], second["custom_id"], third["custom_id"]] == ["c0", "c1", "c3"]
    assert third == {
        "id": request_id(BATCH, batch.entries[3].offset),
        "custom_id": "c3",
        "response": None,
        "error": {"code": code, "message": MESSAGES[code]},
    }


def test_missing_lines_are_refused_unless_their_error_is_given(stage):
    batch = stage(lines=3)
    batch.write(0)
    assembly = batch.assemble()
    with pytest.raises(Conflict, match=r"2 of 3 lines of batch batch_abab.* have no record"):
        _ = assembly.counts
    with pytest.raises(Conflict, match=r"fill\(\)"):
        assembly.errors()
    assembly.fill("batch_failed")
    assert assembly.counts.total == 3


def test_a_batch_with_all_its_answers_does_not_need_its_input(stage):
    batch = stage(lines=1)
    batch.write(0)
    batch.input.unlink()
    assembly = batch.assemble()
    assembly.fill("batch_cancelled")
    assert assembly.counts == Counts(1, 0, 0, 0, 1)
    assert custom_ids(assembly.output()) == ["c0"]


def test_lines_of_models_without_a_gateway_are_not_found(stage):
    batch = stage(lines=4, rejected=(0, 2))
    batch.write(1)
    batch.write(3)
    assembly = batch.assemble()
    assert assembly.missing == 0
    assert assembly.counts == Counts(ok=2, failed=2, expired=0, cancelled=0, total=4)
    found = [json.loads(line) for line in lines_of(assembly.errors())]
    assert [(one["custom_id"], one["error"]["code"]) for one in found] == [
        ("c0", "model_not_found"),
        ("c2", "model_not_found"),
    ]
    assert error_summary(assembly.tally) == [{"code": "model_not_found", "count": 2, "sample_custom_id": "c0"}]


def test_an_input_of_rejected_lines_only_is_a_batch_of_failures(stage):
    assembly = stage(lines=2, rejected=(0, 1)).assemble()
    assert assembly.counts == Counts(0, 2, 0, 0, 2)
    assert custom_ids(assembly.errors()) == ["c0", "c1"]


def test_the_first_record_of_a_line_wins_and_only_that_is_counted(stage):
    batch = stage(lines=2)
    batch.write(0, file="1.1", text="first", usage=Usage(input=1))
    batch.write(0, LineStatus.FAILED, file="1.2", text="second", usage=Usage(input=10))
    batch.write(1, LineStatus.FAILED, file="1.2", text="bad", usage=Usage(input=100))
    batch.write(1, file="1.1", text="late", usage=Usage(input=1000))
    assembly = batch.assemble()
    assert lines_of(assembly.output()) == [batch.line(0, text="first")]
    assert lines_of(assembly.errors()) == [batch.line(1, LineStatus.FAILED, "bad")]
    assert assembly.duplicates == 2
    assert assembly.tally == Tally(lines=2, completed=1, failed=1, input_tokens=101, errors={"bad": (1, "c1")})


def test_bytes_that_are_not_registered_are_ignored(stage):
    batch = stage(lines=3)
    for number in range(3):
        batch.write(number)
    assembly = batch.assemble(batch.pieces[:1] + batch.pieces[2:])
    assert assembly.missing == 1
    assert custom_ids(assembly.output()) == ["c0", "c2"]


def test_a_record_that_is_in_no_plan_is_refused(stage):
    batch = stage(lines=3, rejected=(1,))
    batch.write(1)
    with pytest.raises(StorageError, match=r"1\.1\.seg holds a line at byte 0 that is not in the plan of batch"):
        batch.assemble()
    for offset in (1, batch.entries[2].offset - 1, 10**6):
        batch.entries[1] = Entry(offset, 5, 0)
        batch.write(1, file=f"{offset}.1")
        with pytest.raises(StorageError, match=f"offset {offset}"):
            batch.assemble(batch.pieces[-1:])


def test_a_line_in_two_plans_is_refused(stage):
    batch = stage(lines=3)
    batch.rejected.write_bytes(pack_entries(batch.entries[1:2]))
    with pytest.raises(StorageError, match="the plans hold a line twice"):
        batch.assemble()


def test_an_incomplete_piece_is_refused(stage):
    batch = stage(lines=1)
    batch.write(0)
    (piece,) = batch.pieces
    for damaged in (piece._replace(end=piece.end - 1), piece._replace(end=piece.end + 1), piece._replace(start=1)):
        with pytest.raises(StorageError, match="damaged"):
            batch.assemble([damaged])
    piece.path.unlink()
    with pytest.raises(NotFound, match="no journal"):
        batch.assemble()


def test_a_record_that_is_damaged_before_it_is_copied_is_detected(stage):
    batch = stage(lines=3)
    for number in range(3):
        batch.write(number)
    path, start, end = batch.pieces[1]
    content = bytearray(path.read_bytes())
    content[(start + end) // 2] ^= 1
    path.write_bytes(content)
    assembly = batch.assemble()
    with pytest.raises(StorageError, match=f"record at byte {start} has a wrong checksum"):
        lines_of(assembly.output())


def test_a_record_that_was_replaced_by_another_is_detected(stage):
    batch = stage(lines=2)
    batch.write(0)
    assembly = batch.assemble()
    batch.pieces[0].path.unlink()
    batch.write(1)
    assert batch.pieces[0].end == batch.pieces[1].end
    with pytest.raises(StorageError, match="record at byte 0"):
        lines_of(assembly.output())


def test_a_changed_input_is_detected(stage):
    batch = stage(lines=2)
    batch.input.write_bytes(b" " + batch.input.read_bytes())
    assembly = batch.assemble()
    with pytest.raises(StorageError, match="has no request at byte 0 any more"):
        assembly.fill("batch_expired")
    batch.input.unlink()
    assembly = batch.assemble()
    for _ in range(2):
        with pytest.raises(NotFound, match=r"the input .* is gone"):
            assembly.fill("batch_expired")
    with pytest.raises(Conflict):
        _ = assembly.counts


def test_an_input_that_cannot_be_read_is_an_error_of_the_storage(stage, monkeypatch):
    batch = stage(lines=1)
    assembly = batch.assemble()
    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(StorageUnavailable, match="cannot be read"):
        assembly.fill("batch_failed")
    batch.input.unlink()
    batch.input.mkdir()
    with pytest.raises(StorageUnavailable, match="cannot be opened"):
        assembly.fill("batch_failed")


async def test_each_attempt_writes_new_files_that_are_stored_completely(stage, tmp_path):
    batch = stage(lines=6)
    for number in (5, 0, 3):
        batch.write(number, text="x" * 600_000)
    assembly = batch.assemble()
    assembly.fill("batch_expired")
    store = Store(Local(tmp_path / "store"))
    for chunks in (assembly.output, assembly.errors):
        first, second = await content(chunks()), await content(chunks())
        stored = await store.put("files/one", chunks)
        assert first == second == b"".join([part async for part in store.get("files/one")])
        assert stored.sha256 == hashlib.sha256(first).hexdigest()


async def test_chunks_are_a_mebibyte_and_lines_may_be_longer(stage):
    batch = stage(lines=4)
    for number, size in enumerate((400_000, 2 * MIB, 10, 700_000)):
        batch.write(number, text="x" * size)
    chunks = [chunk async for chunk in batch.assemble().output()]
    assert [len(chunk) for chunk in chunks[:-1]] == [MIB] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= MIB
    assert len(chunks) == 4


def test_more_journals_than_descriptors_are_read(stage, monkeypatch):
    monkeypatch.setattr(module, "_FILES_MAX", 2)
    batch = stage(lines=20)
    for number in range(20):
        batch.write(number, file=f"{number % 7}.1")
    before = open_files()
    assembly = batch.assemble()
    files = module._Files(assembly.paths)
    for number in (0, 1, 2, 0, 6, 5, 0):
        assert os.fstat(files.descriptor(number)).st_ino == assembly.paths[number].stat().st_ino
        assert len(files._open) <= 2
    files.close()
    assert custom_ids(assembly.output()) == [f"c{number}" for number in range(20)]
    assert open_files() == before


async def test_a_cancelled_copy_closes_its_files_once_its_thread_has_finished(stage, monkeypatch):
    batch = stage(lines=2)
    batch.write(0)
    assembly = batch.assemble()
    assembly.fill("batch_expired")
    before = open_files()
    entered, gate = threading.Event(), threading.Event()
    read = module.read_open

    def slowly(*args):
        entered.set()
        assert gate.wait(20)
        return read(*args)

    monkeypatch.setattr(module, "read_open", slowly)
    task = asyncio.ensure_future(content(assembly.output()))
    assert await asyncio.to_thread(entered.wait, 20)
    task.cancel()
    await asyncio.sleep(0)
    assert open_files() - before == {str(batch.pieces[0].path)}
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert open_files() == before


def test_the_index_is_small(stage):
    index = stage(lines=50).assemble().index
    sizes = [index.offsets.itemsize, index.lengths.itemsize, index.places.itemsize, len(index.kinds) // 50]
    assert len(index.offsets) == len(index.lengths) == len(index.places) == 50
    assert sum(sizes) <= 24


def test_errors_are_rolled_up_the_most_frequent_first(stage):
    batch = stage(lines=9, rejected=(8,))
    for number, code in enumerate(("b", "a", "b", "c")):
        batch.write(number, LineStatus.FAILED, text=code)
    assembly = batch.assemble()
    assembly.fill("batch_expired")
    assert error_summary(assembly.tally) == [
        {"code": "batch_expired", "count": 4, "sample_custom_id": "c4"},
        {"code": "b", "count": 2, "sample_custom_id": "c0"},
        {"code": "a", "count": 1, "sample_custom_id": "c1"},
        {"code": "c", "count": 1, "sample_custom_id": "c3"},
        {"code": "model_not_found", "count": 1, "sample_custom_id": "c8"},
    ]


def test_the_manifest_lists_files_and_counts():
    counts = Counts(ok=3, failed=1, expired=2, cancelled=0, total=6)
    assert manifest(counts, input_sha256="aa", output_sha256="bb", error_sha256=None) == {
        "version": 1,
        "lines": 6,
        "counts": {"total": 6, "completed": 3, "failed": 1, "expired": 2, "cancelled": 0},
        "sha256": {"input": "aa", "output": "bb", "errors": None},
    }


def test_counts_that_do_not_add_up_are_detected(stage):
    batch = stage(lines=2)
    batch.write(0)
    batch.write(1)
    assembly = batch.assemble()
    assembly.tally.completed -= 1
    with pytest.raises(StorageError, match="do not add up"):
        _ = assembly.counts


LINES = 8
appends = st.tuples(
    st.integers(0, LINES - 1), st.sampled_from(LineStatus), st.sampled_from(["1.1", "1.2", "2.1", "3.1"]), st.booleans()
)


@settings(deadline=None, max_examples=100)
@given(st.lists(appends, max_size=20), st.sets(st.integers(0, LINES - 1), max_size=2), st.integers(1, 3))
def test_each_line_is_in_a_file_once_and_in_order_wherever_its_records_are(written, rejected, plans):
    with tempfile.TemporaryDirectory() as folder:
        batch = Stage(folder, LINES, rejected=sorted(rejected), plans=plans)
        expected = {}
        pieces = []
        for turn, (number, status, file, is_registered) in enumerate(written):
            if number in rejected:
                continue
            batch.write(number, status, file=file, text=f"t{turn}")
            if is_registered:
                pieces.append(batch.pieces[-1])
                expected.setdefault(number, (status, f"t{turn}"))
        assembly = batch.assemble(pieces)
        assert assembly.missing == LINES - len(expected) - len(rejected)
        assert assembly.duplicates == len(pieces) - len(expected)
        assembly.fill("batch_cancelled")
        output, errors = lines_of(assembly.output()), lines_of(assembly.errors())
        good = {number: text for number, (status, text) in expected.items() if status is LineStatus.OK}
        assert output == [batch.line(number, LineStatus.OK, good[number]) for number in sorted(good)]
        bad = [number for number in range(LINES) if number not in good]
        assert [json.loads(line)["custom_id"] for line in errors] == [f"c{number}" for number in bad]
        for number, line in zip(bad, errors, strict=True):
            if number in expected:
                assert line == batch.line(number, *expected[number])
            else:
                code = "model_not_found" if number in rejected else "batch_cancelled"
                assert json.loads(line)["error"]["code"] == code
        counts = assembly.counts
        assert (counts.ok, sum(counts[1:-1]), counts.total) == (len(output), len(errors), LINES)
        assert sum(one["count"] for one in error_summary(assembly.tally)) == len(errors)
        assert assembly.tally.lines == LINES


def test_a_piece_may_hold_many_records(stage):
    batch = stage(lines=30)
    for number in reversed(range(30)):
        batch.write(number)
    whole = Piece(batch.pieces[0].path, 0, batch.pieces[-1].end)
    assert len(list(scan(*whole))) == 30
    assert lines_of(batch.assemble([whole]).output()) == lines_of(batch.assemble().output())
