"""The garbage collector: what it removes and when, what it keeps, and that it can die anywhere."""

import asyncio
import fcntl
import logging
import math
import os
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest
from obstore.store import MemoryStore

from batchwright import JobStatus, NewJob, NotFound
from batchwright.batches.journal import workspace as workspace_module
from batchwright.batches.journal.workspace import Workspace, plan_key, segment_key
from batchwright.batches.operations import PROCESS, process_job
from batchwright.batches.settings import BatchSettings
from batchwright.batches.store import Batches, Ending, NewBatch
from batchwright.batches.upkeep import collector as module
from batchwright.batches.upkeep.collector import COMPONENT, OWNER, SQL, Amount, Collected, Collector
from batchwright.db.database import connect_arguments
from batchwright.engine.catalog import Catalog
from batchwright.engine.retention import Retention, RetentionSettings
from batchwright.engine.upkeep import Upkeep, lock_round
from batchwright.engine.worker.processes import Processes
from batchwright.errors import Conflict, DatabaseError, StorageError, StorageUnavailable
from batchwright.files import uploads
from batchwright.files.store import Files, NewFile, new_file_id, object_key
from batchwright.files.uploads import NewUpload, Uploads, new_part_id, new_upload_id, part_key
from batchwright.operations.decorator import operation
from batchwright.operations.registry import Registry
from batchwright.states import BatchStatus, UploadStatus
from batchwright.storage import OPERATIONS, StorageSettings, Store
from batchwright.storage.local import Local
from batchwright.storage.remote import Remote
from batchwright.storage.settings import MIB
from batchwright.telemetry.metrics import Counts, series
from tests.conftest import database
from tests.engine.planning import indexes, nodes, plan, touched
from tests.engine.steps import another, hand_over, status
from tests.support import DATABASE, fail, raw, succeed

HOUR, DAY = 3600.0, 86_400.0
GRACE = 601.0
VALIDATING, IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED = BatchStatus
OPEN = [VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING]
ENDED = [COMPLETED, FAILED, EXPIRED, CANCELLED]


@operation(PROCESS)
async def process(batch_id: str) -> None:
    return None


@pytest.fixture
def backend(request, tmp_path):
    if getattr(request, "param", "folder") == "folder":
        return Local(tmp_path / "store")
    return Remote(MemoryStore(), part_bytes=5 * MIB, name="memory")


in_both_stores = pytest.mark.parametrize("backend", ["folder", "remote"], indirect=True)


@pytest.fixture
def store(backend):
    return Store(backend, StorageSettings(attempts=1))


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "work", 10**9)


@pytest.fixture
async def stage(queue, store, workspace, clock):
    await clock.advance(queue, 0)
    return Stage(queue, store, workspace, clock)


class Stage:
    """A database, a store and a work folder, filled before the collector runs."""

    def __init__(self, queue, store, workspace, clock):
        self.queue, self.store, self.workspace, self.clock = queue, store, workspace, clock
        self.files, self.batches = Files(queue.database, store), Batches(queue)
        self.uploads = Uploads(queue.database, self.files)
        self.collector = self.another_collector()

    def another_collector(self, retention=None, **settings):
        return Collector(
            self.queue, self.store, self.workspace, BatchSettings(**settings), retention or RetentionSettings()
        )

    async def later(self, seconds):
        await self.clock.advance(self.queue, seconds)

    async def collect(self, dry_run=False):
        return await self.collector.collect(dry_run)

    async def upload(self, data=b"{}\n", *, tenant="acme", **options):
        id = new_file_id()
        stored = await self.store.put(object_key(id), data)
        new = NewFile(id=id, tenant=tenant, purpose="batch", filename="in.jsonl", stored=stored, **options)
        return (await self.files.add(new))[0]

    async def upload_in_parts(self, *pieces):
        """An upload with these parts; returns its id and the ids of the parts."""
        size = sum(map(len, pieces))
        new = NewUpload(id=new_upload_id(), tenant="acme", purpose="batch", filename="f", mime_type="m", bytes=size)
        await self.uploads.create(new)
        parts = [new_part_id() for _ in pieces]
        for part, piece in zip(parts, pieces, strict=True):
            stored = await self.store.put(part_key(new.id, part), piece)
            await self.uploads.add_part(new.id, part, stored, tenant="acme")
        return new.id, parts

    async def delete(self, file):
        await self.files.delete(file.id, tenant=file.tenant)

    async def batch(self, state=IN_PROGRESS, *, input=None, total=3, files=True, error=None, **options):
        """A batch in this state; `files` says whether its files could be written."""
        input = input or await self.upload()
        new = NewBatch(tenant="acme", endpoint="/v1/x", input_file_id=input.id, completion_window="24h", **options)
        (job,) = await Catalog(self.queue.database, Registry([process])).prepare([process_job(new)])
        await self.batches.create(new, job)
        if total:
            await self._begin(new.id, state, total)
        if state in ENDED:
            await self._end(new.id, state, total, files, error)
        assert (await self.row(new.id)).status is state
        return await self.row(new.id)

    async def _begin(self, id, state, total):
        if state is not VALIDATING:
            await self.batches.begin(id, total=total, models=["m"], input_sha256="0" * 64)
        if state in (FINALIZING, COMPLETED):
            await self.batches.finalize(id)
        if state in (CANCELLING, CANCELLED):
            await self.batches.cancel(id, tenant=None)

    async def _end(self, id, state, total, files, error):
        ending = Ending(
            counts={"completed": total, "failed": 0, "expired": 0, "cancelled": 0},
            manifest={"lines": total} if files and total else None,
            error_file_id=error.id if error else None,
        )
        verbs = {COMPLETED: "complete", FAILED: "fail", EXPIRED: "expire", CANCELLED: "end_cancelled"}
        assert await getattr(self.batches, verbs[state])(id, ending) is state

    async def end_job(self, batch, how=succeed):
        claim = await self.queue.claim_job("w1", batch.job_id, [PROCESS])
        assert await how(self.queue, claim)

    async def leave_behind(self, batch, segments=1, folder=True):
        """Add a plan, registered answers and a work folder, as a batch leaves them."""
        await self.store.put(plan_key(batch.id, "model_map.json"), b"{}")
        for seq in range(segments):
            key = segment_key(batch.id, 0, 1, "h", 7 * seq, 7 * seq + 7)
            await self.store.put(key, b"answers")
            await raw(
                self.queue,
                "INSERT INTO batchwright.batch_segment (batch_id, shard, claim, seq, host, key, start_byte, end_byte, "
                "lines, tally, registered_at) VALUES (%(id)s, 0, 1, %(seq)s, 'h', %(key)s, 0, 7, 1, '{}', now())",
                id=batch.id,
                seq=seq,
                key=key,
            )
        if folder:
            self.folder(batch.id)

    def folder(self, name, at=None):
        folder = self.workspace.root / name
        folder.mkdir(parents=True)
        (folder / "input.jsonl").write_bytes(b"12345")
        if at is not None:
            os.utime(folder, (at.timestamp(), at.timestamp()))
        return folder

    def folders(self):
        return sorted(path.name for path in self.workspace.root.iterdir() if path.is_dir())

    async def objects(self, prefix=""):
        return [found.key async for found in self.store.list(prefix)]

    async def of_batch(self, batch):
        """What is left of a batch: objects, segments, and whether its folder exists."""
        objects = await self.objects(f"batches/{batch.id}")
        segments = await self.batches.segments(batch.id)
        return len(objects), len(segments), self.workspace.folder(batch.id).exists()

    async def row(self, id):
        return await self.batches.get(id, tenant=None)

    async def has_row(self, file):
        return bool(await raw(self.queue, "SELECT FROM batchwright.file WHERE id = %(id)s", id=file.id))

    async def rounds(self, collector=None, names=("garbage", "unknown objects"), turns=200):
        """Run all rounds as upkeep does, until none of them wants another turn; return the number of turns."""
        collector = collector or self.collector
        ran = 0
        for one in collector.rounds():
            while one.name in names:
                ran += 1
                assert ran < turns, "the rounds do not end"
                async with lock_round(self.queue.database, one.name) as session:
                    if await one.run(session) is not True:
                        break
        return ran


# Files --------------------------------------------------------------------------------------------------------------


@in_both_stores
async def test_an_expired_file_is_deleted_and_its_bytes_go_ten_minutes_later(stage):
    file = await stage.upload(b"12345", expires_seconds=60)
    await stage.later(59)
    assert await stage.collect() == Collected()
    await stage.later(1)
    with pytest.raises(NotFound):
        await stage.files.get(file.id, tenant="acme")
    assert await stage.collect() == Collected(expired_files=Amount(1))
    assert await stage.objects() == [file.key]
    await stage.later(GRACE)
    assert await stage.collect() == Collected(deleted_files=Amount(1, 5))
    assert await stage.objects() == []
    assert not await stage.has_row(file)


async def test_one_collection_deletes_and_removes_a_file_that_expired_long_ago(stage):
    await stage.upload(b"12345", expires_seconds=60)
    await stage.later(DAY)
    assert await stage.collect() == Collected(expired_files=Amount(1), deleted_files=Amount(1, 5))
    assert await stage.objects() == []


async def test_a_deleted_file_keeps_its_bytes_for_requests_that_still_read_it(stage):
    file = await stage.upload(b"12345")
    await stage.delete(file)
    await stage.later(599)
    assert await stage.collect() == Collected()
    assert await stage.objects() == [file.key]
    await stage.later(2)
    assert await stage.collect() == Collected(deleted_files=Amount(1, 5))
    assert await stage.objects() == []


async def test_files_that_nobody_deleted_stay_for_ever(stage):
    file = await stage.upload()
    await stage.later(10_000 * DAY)
    assert await stage.collect() == Collected()
    assert await stage.objects() == [file.key]
    assert await stage.files.get(file.id, tenant="acme") == file


@pytest.mark.parametrize("state", OPEN)
async def test_the_deleted_input_of_an_open_batch_stays(stage, state):
    file = await stage.upload()
    await stage.batch(state, input=file)
    await stage.delete(file)
    await stage.later(DAY)
    await stage.collect()
    assert await stage.objects("files") == [file.key]
    assert await stage.files.get(file.id, tenant=None, also_gone=True) == file


@pytest.mark.parametrize("state", ENDED)
async def test_the_deleted_input_of_an_ended_batch_goes(stage, state):
    file = await stage.upload()
    await stage.batch(state, input=file)
    await stage.delete(file)
    await stage.later(GRACE)
    assert (await stage.collect()).deleted_files == Amount(1, file.bytes)


async def test_an_input_that_two_batches_share_stays_for_the_one_that_is_open(stage):
    file = await stage.upload()
    await stage.batch(COMPLETED, input=file)
    await stage.batch(IN_PROGRESS, input=file)
    await stage.delete(file)
    await stage.later(DAY)
    assert (await stage.collect()).deleted_files == Amount()


async def test_the_deleted_input_of_a_batch_that_may_be_repaired_stays_as_long_as_its_answers(stage):
    file = await stage.upload()
    batch = await stage.batch(FAILED, input=file, files=False)
    await stage.delete(file)
    await stage.later(7 * DAY - 1)
    await stage.collect()
    assert await stage.has_row(file)
    await stage.later(2)
    await stage.collect()
    assert (await stage.row(batch.id)).segments_gone_at is not None
    assert (await stage.collect()).deleted_files == Amount(1, file.bytes)


async def test_the_deleted_error_file_of_a_batch_stays_while_another_repeats_its_lines(stage):
    error, output = await stage.upload(), await stage.upload()
    first = await stage.batch(COMPLETED, error=error)
    retry = await stage.batch(VALIDATING, retry_of=first.id, family=first.id)
    await stage.delete(error)
    await stage.delete(output)
    await stage.later(2 * HOUR)
    assert (await stage.collect()).deleted_files == Amount(1, output.bytes)
    assert error.key in await stage.objects("files")
    await stage.batches.cancel(retry.id, tenant=None)
    await stage._end(retry.id, CANCELLED, 0, False, None)
    assert (await stage.collect()).deleted_files == Amount(1, error.bytes)


async def test_files_that_must_stay_do_not_delay_the_removal_of_later_ones(stage, monkeypatch):
    monkeypatch.setattr(module, "_FILES", 2)
    needed = [await stage.upload() for _ in range(5)]
    for file in needed:
        await stage.batch(IN_PROGRESS, input=file)
    free = [await stage.upload() for _ in range(3)]
    for file in (*needed, *free):
        await stage.delete(file)
        await stage.later(1)
    await stage.later(GRACE)
    assert (await stage.collect()).deleted_files.count == 3
    assert len(await stage.objects("files")) == 5


@pytest.mark.parametrize("dies_at", ["objects", "row"])
async def test_a_collector_that_dies_while_it_removes_a_file_leaves_nothing_that_a_user_can_see(
    stage, monkeypatch, dies_at
):
    file = await stage.upload(b"12345")
    await stage.delete(file)
    await stage.later(GRACE)
    with monkeypatch.context() as patch:
        die_at(patch, stage, *{"objects": ("delete", None), "row": (None, "remove_files")}[dies_at])
        with pytest.raises(ConnectionResetError):
            await stage.collect()
    with pytest.raises(NotFound):
        await stage.files.get(file.id, tenant="acme")
    assert await stage.has_row(file), "the row knows which bytes are still to be removed"
    assert await stage.objects() == ([file.key] if dies_at == "objects" else [])
    assert await stage.collect() == Collected(deleted_files=Amount(1, 5))
    assert await stage.objects() == []
    assert not await stage.has_row(file)


def die_at(patch, stage, of_store, statement):
    """Die at a call of the store, or before a statement."""

    def die(*_, **__):
        raise ConnectionResetError

    if of_store:
        patch.setattr(stage.store, of_store, die)
    if statement:
        database = stage.queue.database
        ask = database.ask
        patch.setattr(database, "ask", lambda sql, *rest: die() if sql == SQL[statement] else ask(sql, *rest))


# Uploads ------------------------------------------------------------------------------------------------------------


@in_both_stores
async def test_the_parts_of_an_upload_go_ten_minutes_after_its_end_and_its_row_a_month_later(stage):
    done, parts = await stage.upload_in_parts(b"abc", b"def")
    stopped, _ = await stage.upload_in_parts(b"ghi")
    late, _ = await stage.upload_in_parts(b"jkl")
    await stage.store.put(part_key(late, new_part_id()), b"of a writer that died")
    _, file = await stage.uploads.complete(done, parts, tenant="acme")
    await stage.uploads.cancel(stopped, tenant="acme")
    assert await stage.collect() == Collected()
    await stage.later(GRACE)
    assert await stage.collect(dry_run=True) == Collected(upload_parts=Amount(3, 9))
    assert await stage.collect() == Collected(upload_parts=Amount(3, 9))
    assert await stage.objects() == sorted([file.key, *await stage.objects(f"uploads/{late}")])
    assert len(await stage.objects()) == 3
    again, same = await stage.uploads.complete(done, parts, tenant="acme")
    assert (again.status, same) == (UploadStatus.COMPLETED, file)
    await stage.later(HOUR)
    with pytest.raises(Conflict, match="'expired'"):
        await stage.uploads.cancel(late, tenant="acme")
    assert await stage.collect() == Collected(upload_parts=Amount(2, 24))
    assert (await stage.uploads.get(late, tenant="acme")).status is UploadStatus.EXPIRED
    assert await stage.objects() == [file.key]
    assert await raw(stage.queue, "SELECT FROM batchwright.upload_part") == []
    await stage.store.put(part_key(late, new_part_id()), b"late")
    await stage.later(31 * DAY)
    found = await stage.collect()
    assert (found.old_uploads, found.unknown_objects) == (Amount(3), Amount(1, 4))
    with pytest.raises(NotFound, match="there is no upload"):
        await stage.uploads.get(done, tenant="acme")


async def test_an_upload_with_many_parts_is_cleared_in_small_steps(stage, monkeypatch):
    monkeypatch.setattr(module, "_OBJECTS", 2)
    id, _ = await stage.upload_in_parts(*[b"x"] * 5)
    await stage.uploads.cancel(id, tenant="acme")
    await stage.later(GRACE)
    assert (await stage.collect(dry_run=True)).upload_parts == Amount(5, 5)
    await stage.rounds()
    assert await stage.objects() == []
    assert await raw(stage.queue, "SELECT FROM batchwright.upload WHERE parts_gone_at IS NULL") == []


# What batches leave behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ENDED)
async def test_what_an_ended_batch_left_behind_goes_after_an_hour(stage, state):
    batch, beside = await stage.batch(state), await stage.batch(IN_PROGRESS)
    await stage.leave_behind(batch, segments=3)
    await stage.leave_behind(beside)
    await stage.later(HOUR)
    assert await stage.collect() == Collected()
    assert await stage.of_batch(batch) == (4, 3, True)
    assert (await stage.row(batch.id)).segments_gone_at is None
    await stage.later(1)
    assert await stage.collect() == Collected(
        ended_batches=Amount(1), batch_objects=Amount(4, 23), batch_segments=Amount(3), work_folders=Amount(1, 5)
    )
    assert await stage.of_batch(batch) == (0, 0, False)
    assert await stage.of_batch(beside) == (2, 1, True)
    assert (await stage.row(batch.id)).segments_gone_at == stage.clock.time
    assert await stage.collect() == Collected()


@pytest.mark.parametrize(("total", "files", "hours"), [(3, False, 7 * 24), (3, True, 1), (0, False, 1)])
async def test_a_failed_batch_without_files_is_kept_a_week_for_repair(stage, total, files, hours):
    batch = await stage.batch(FAILED, total=total, files=files)
    await stage.leave_behind(batch)
    await stage.later(hours * HOUR)
    await stage.collect()
    assert await stage.of_batch(batch) == (2, 1, True)
    await stage.later(1)
    await stage.collect()
    assert await stage.of_batch(batch) == (0, 0, False)


async def test_a_batch_that_was_repaired_is_like_any_other(stage):
    batch = await stage.batch(FAILED, files=False)
    await stage.leave_behind(batch)
    await stage.later(DAY)
    counts = {"completed": 3, "failed": 0, "expired": 0, "cancelled": 0}
    assert await stage.batches.repair(batch, Ending(counts=counts, manifest={"lines": 3}, error_summary={}))
    await stage.collect()
    assert await stage.of_batch(batch) == (0, 0, False)


async def test_times_can_be_configured(stage):
    quick = stage.another_collector(segments_kept_hours=0.0, failed_segments_kept_days=math.inf)
    ended, failed = await stage.batch(COMPLETED), await stage.batch(FAILED, files=False)
    await stage.leave_behind(ended)
    await stage.leave_behind(failed)
    await stage.later(1)
    assert (await quick.collect(dry_run=False)).ended_batches == Amount(1)
    assert await stage.of_batch(ended) == (0, 0, False)
    await stage.later(20_000 * DAY)
    assert (await quick.collect(dry_run=False)).ended_batches == Amount()
    assert await stage.of_batch(failed) == (2, 1, True)


DEATHS = {
    "before it is unreadable": (None, "let_segments_go"),
    "at the objects": ("delete", None),
    "at the segments": (None, "remove_segments"),
    "at the last": (None, "end_leftovers"),
}


@pytest.mark.parametrize("dies_at", list(DEATHS))
@pytest.mark.parametrize("by", ["hand", "rounds"])
async def test_a_collector_that_dies_on_the_way_is_followed_by_one_that_finishes(stage, monkeypatch, dies_at, by):
    batch = await stage.batch(COMPLETED)
    await stage.leave_behind(batch, segments=3)
    await stage.later(HOUR + 1)
    run = stage.rounds if by == "rounds" else stage.collect
    with monkeypatch.context() as patch:
        die_at(patch, stage, *DEATHS[dies_at])
        with pytest.raises(ConnectionResetError):
            await run()
    is_unreadable = (await stage.row(batch.id)).segments_gone_at is not None
    assert is_unreadable == (dies_at != "before it is unreadable")
    if not is_unreadable:
        assert await stage.of_batch(batch) == (4, 3, True)
    await run()
    assert await stage.of_batch(batch) == (0, 0, False)
    assert await raw(stage.queue, "SELECT leftovers_gone_at FROM batchwright.batch") == [(stage.clock.time,)]


async def test_answers_are_marked_as_gone_before_the_first_of_them_is_removed(stage, pool, monkeypatch):
    batch = await stage.batch(COMPLETED)
    await stage.leave_behind(batch)
    await stage.later(HOUR + 1)
    seen = []
    delete = stage.store.delete
    async with another(stage.queue, pool) as elsewhere:

        async def watched(*keys):
            seen.append((await Batches(elsewhere).get(batch.id, tenant=None)).segments_gone_at)
            await delete(*keys)

        monkeypatch.setattr(stage.store, "delete", watched)
        await stage.rounds()
    assert seen == [stage.clock.time]
    assert await stage.of_batch(batch) == (0, 0, False)


@in_both_stores
async def test_a_batch_that_left_much_behind_is_cleared_in_small_steps(stage, monkeypatch):
    monkeypatch.setattr(module, "_OBJECTS", 2)
    monkeypatch.setattr(module, "_SEGMENTS", 2)
    big, small = await stage.batch(COMPLETED), await stage.batch(COMPLETED)
    await stage.leave_behind(big, segments=7)
    await stage.leave_behind(small)
    await stage.later(HOUR + 1)
    deleted = []
    delete = stage.store.delete

    async def counted(*keys):
        deleted.append(len(keys))
        await delete(*keys)

    monkeypatch.setattr(stage.store, "delete", counted)
    dry = await stage.collect(dry_run=True)
    assert deleted == []
    wet = await stage.collect()
    assert wet == dry
    assert (wet.batch_objects.count, wet.batch_segments.count, wet.ended_batches.count) == (10, 8, 2)
    assert max(deleted) == 2
    assert await stage.of_batch(big) == await stage.of_batch(small) == (0, 0, False)


async def test_a_store_that_still_lists_deleted_objects_does_not_keep_the_collector_busy_for_ever(stage, monkeypatch):
    monkeypatch.setattr(module, "_OBJECTS", 2)
    batch = await stage.batch(COMPLETED)
    await stage.leave_behind(batch, segments=4)
    await stage.later(HOUR + 1)

    async def deaf(*keys):
        return None

    monkeypatch.setattr(stage.store, "delete", deaf)
    assert (await stage.collect()).ended_batches == Amount(1)


async def test_a_work_folder_in_use_stays_until_it_is_free_and_stale(stage):
    batch = await stage.batch(COMPLETED)
    await stage.leave_behind(batch)
    await stage.later(HOUR + 1)
    with stage.workspace.use(batch.id):
        dry = await stage.collect(dry_run=True)
        assert await stage.collect() == dry
        assert dry.work_folders == Amount()
        assert await stage.of_batch(batch) == (0, 0, True)
    just_now = stage.clock.time.timestamp()
    os.utime(stage.workspace.folder(batch.id), (just_now, just_now))
    assert (await stage.collect()).work_folders == Amount()
    await stage.later(HOUR + 1)
    assert (await stage.collect()).work_folders == Amount(1, 5)
    assert await stage.of_batch(batch) == (0, 0, False)


# Work folders -------------------------------------------------------------------------------------------------------


async def test_only_stale_work_folders_are_removed(stage):
    open, kept, cleared = [await stage.batch(state) for state in (IN_PROGRESS, COMPLETED, COMPLETED)]
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    await raw(
        stage.queue,
        "UPDATE batchwright.batch SET segments_gone_at = now(), leftovers_gone_at = now() WHERE id = %(id)s",
        id=cleared.id,
    )
    of_nobody, fresh = f"batch_{'0' * 32}", f"batch_{'1' * 32}"
    for name in (open.id, kept.id, cleared.id, of_nobody, "somebody_elses", "batch_1", f"{of_nobody}.txt"):
        stage.folder(name, at=long_ago)
    stage.folder(fresh)
    ours = stage.workspace.id
    dry = await stage.collect(dry_run=True)
    assert await stage.collect() == dry == Collected(work_folders=Amount(2, 10))
    assert stage.folders() == sorted([open.id, kept.id, fresh, "batch_1", f"{of_nobody}.txt", "somebody_elses"])
    assert Workspace(stage.workspace.root, 1).id == ours
    await stage.later(HOUR + 60)  # folders' ages are measured by the machine's clock
    await stage.collect()
    assert fresh not in stage.folders()


async def test_many_folders_are_checked_in_small_steps(stage, monkeypatch):
    monkeypatch.setattr(module, "_FOLDERS", 2)
    kept = await stage.batch(IN_PROGRESS)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    for name in (kept.id, *(f"batch_{n:032x}" for n in range(7))):
        stage.folder(name, at=long_ago)
    assert (await stage.collect()).work_folders == Amount(7, 35)
    assert stage.folders() == [kept.id]


async def test_folders_of_another_database_stay(stage, caplog):
    """Two databases on one machine share the work folder unless a setting says otherwise."""
    stage.workspace.root.mkdir()
    (stage.workspace.root / OWNER).write_text("another")
    ended = await stage.batch(COMPLETED)
    await stage.leave_behind(ended)
    stage.folder(f"batch_{'0' * 32}", at=datetime(2020, 1, 1, tzinfo=UTC))
    await stage.later(HOUR + 1)
    with caplog.at_level(logging.WARNING):
        assert (await stage.collect()).work_folders == Amount(1, 5)
    assert stage.folders() == [f"batch_{'0' * 32}"]
    assert f"{stage.workspace.root} belongs to another database" in caplog.text


async def test_the_first_database_to_collect_owns_the_work_folder(stage):
    stage.folder(f"batch_{'0' * 32}", at=datetime(2020, 1, 1, tzinfo=UTC))
    await stage.collect(dry_run=True)
    assert not (stage.workspace.root / OWNER).exists()
    await stage.collect()
    ((_, name),) = await stage.queue.database.ask(SQL["here"], {})
    assert (stage.workspace.root / OWNER).read_text() == name
    stage.folder(f"batch_{'1' * 32}", at=datetime(2020, 1, 1, tzinfo=UTC))
    assert (await stage.collect()).work_folders == Amount(1, 5)


async def test_each_database_has_a_unique_name(stage, server, template):
    with database(server, "batchwright_test_name_" + template[-8:]) as url, psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA batchwright")
        connection.execute("CREATE TABLE batchwright.migration AS SELECT 1 AS number, now() AS applied_at")
        (other,) = connection.execute(SQL["here"].replace("%(now)s", "NULL")).fetchone()[1:]
    ((_, name),) = await stage.queue.database.ask(SQL["here"], {})
    assert (name == other, len(name), len(other)) == (False, 21, 21)


async def test_an_interrupted_removal_is_finished_later(stage, monkeypatch):
    batch = await stage.batch(COMPLETED)
    await stage.leave_behind(batch)
    await stage.later(HOUR + 1)
    with monkeypatch.context() as patch:
        patch.setattr(workspace_module.shutil, "rmtree", lambda *_, **__: None)
        await stage.collect()
    (doomed,) = stage.folders()
    assert doomed.startswith(f"{batch.id}.")
    await stage.collect(dry_run=True)
    assert stage.folders() == [doomed]
    await stage.collect()
    assert stage.folders() == []


def test_a_folder_that_was_created_again_is_not_removed_by_a_collector_that_waited_for_its_lock(workspace, monkeypatch):
    """Two collectors open the folder's lock file; before the second gets the lock, a worker uses the folder again."""
    (workspace.folder("b")).mkdir(parents=True)
    lock = fcntl.flock
    using = workspace.use("b")

    def late(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        assert workspace.remove("b")
        using.__enter__()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not workspace.remove("b")
    assert workspace.folder("b").exists()
    using.__exit__(None, None, None)
    assert workspace.remove("b")
    assert not workspace.folder("b").exists()


def test_whether_a_folder_is_in_use_can_be_checked_without_changing_it(workspace):
    assert not workspace.in_use("b")
    assert workspace.size("b") is None
    (workspace.folder("b")).mkdir(parents=True)
    assert not workspace.in_use("b")
    assert list(workspace.folder("b").iterdir()) == []
    with workspace.use("b"):
        assert workspace.in_use("b")
        assert not workspace.remove("b")
    assert not workspace.in_use("b")


# Objects without a row ----------------------------------------------------------------------------------------------


@in_both_stores
async def test_objects_without_a_row_are_removed_after_a_day(stage):
    known, deleted = await stage.upload(), await stage.upload()
    await stage.delete(deleted)
    orphan = object_key(new_file_id())
    await stage.store.put(orphan, b"12345")
    await stage.later(DAY - HOUR)
    assert (await stage.collect()).unknown_objects == Amount()
    await stage.later(2 * HOUR)
    assert (await stage.collect()).unknown_objects == Amount(1, 5)
    assert await stage.objects("files") == [known.key]


@in_both_stores
async def test_objects_that_do_not_have_our_names_are_kept(stage):
    id = new_file_id()
    unborn = f"file-{'f' * 32}"
    names = ["files/readme.txt", f"files/{id}", f"files/zz/{id}", f"files/00/{id[:-2]}11", object_key(unborn)]
    names += ["batches/batch_1/x", f"batches/notes/{id}", "others/x"]
    for name in names:
        await stage.store.put(name, b"12345")
    await stage.later(1000 * DAY)
    assert await stage.collect() == Collected()
    assert await stage.objects() == sorted(names)


async def test_a_new_object_that_links_an_old_file_counts_as_new(stage, tmp_path):
    old = tmp_path / "old.jsonl"
    old.write_bytes(b"12345")
    old.chmod(0o600)  # a file that others can read is copied, not linked
    os.utime(old, (0, 0))
    key = object_key(new_file_id())
    await stage.store.put_file(key, old)
    assert [found.modified_at.year async for found in stage.store.list()] == [1970]
    assert await stage.collect() == Collected()
    assert await stage.objects() == [key]
    await stage.later(DAY + 60)
    assert (await stage.collect()).unknown_objects == Amount(1, 5)


@in_both_stores
async def test_objects_that_a_lost_writer_stores_later_are_removed_after_a_day(stage):
    gone, cleared, open = f"batch_{'0' * 32}", await stage.batch(COMPLETED), await stage.batch(IN_PROGRESS)
    await stage.later(HOUR + 1)
    await stage.collect()
    for id in (gone, cleared.id, open.id):
        await stage.store.put(segment_key(id, 0, 9, "h", 0, 5), b"12345")
    await stage.later(DAY - HOUR - 60)
    assert await stage.collect() == Collected()
    await stage.later(120)
    assert await stage.collect() == Collected(unknown_objects=Amount(2, 10))
    assert await stage.objects("batches") == [segment_key(open.id, 0, 9, "h", 0, 5)]


@in_both_stores
async def test_objects_of_another_database_are_kept(stage, caplog):
    await stage.store.put(OWNER, b"another")
    orphan = object_key(new_file_id())
    await stage.store.put(orphan, b"12345")
    await stage.later(2 * DAY)
    for dry_run in (True, False):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert await stage.collect(dry_run) == Collected()
        assert "belongs to another database" in caplog.text
        assert f"delete {OWNER!r} in it" in caplog.text
    assert orphan in await stage.objects()


@in_both_stores
async def test_a_large_store_is_checked_over_many_rounds_and_no_object_twice(stage, monkeypatch):
    monkeypatch.setattr(module, "_OBJECTS_LISTED", 3)
    known = [await stage.upload() for _ in range(5)]
    for _ in range(5):
        await stage.store.put(object_key(new_file_id()), b"12345")
    await stage.later(2 * DAY)
    monkeypatch.setattr(module, "_ROUND_SECONDS_MAX", 1.5)
    monkeypatch.setattr(module, "time", Steps())
    begun = []
    listing = stage.store.list

    def watched(prefix, after=None):
        begun.append((prefix, after))
        return listing(prefix, after)

    monkeypatch.setattr(stage.store, "list", watched)
    assert await stage.rounds(names=("unknown objects",)) == len(begun) == 6
    places = [after for prefix, after in begun if prefix == "files"]
    assert places[0] is None
    assert places[1:] == sorted(places[1:])
    assert sorted(await stage.objects("files")) == sorted(file.key for file in known)


class Steps:
    """A clock that gives each round time for one step."""

    def __init__(self):
        self.asked = 0

    def monotonic(self):
        self.asked += 1
        return float(self.asked)


# Idempotency keys ---------------------------------------------------------------------------------------------------


async def test_idempotency_keys_can_be_used_again_after_thirty_days(stage):
    key = {"idempotency_key": "k"}
    file = await stage.upload(**key)
    await stage.batch(VALIDATING, input=file, idempotency_digest=b"d", **key)
    young = await stage.upload(tenant="other", **key)
    await stage.later(30 * DAY)
    assert await stage.collect() == Collected()
    await stage.later(1)
    await raw(
        stage.queue,
        "UPDATE batchwright.file SET created_at = %(now)s WHERE id = %(id)s",
        now=stage.clock.time,
        id=young.id,
    )
    assert await stage.collect() == Collected(idempotency_keys=Amount(2))
    again = await stage.upload(b"other", **key)
    assert again.id != file.id
    assert (await stage.upload(tenant="other", **key)).id == young.id
    await stage.batch(VALIDATING, input=file, idempotency_digest=b"other", **key)


async def test_keys_are_removed_in_small_steps(stage, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 2)
    monkeypatch.setattr(module.Collector._page, "__kwdefaults__", {"limit": 2})
    for n in range(5):
        await stage.upload(tenant=f"t{n % 2}", idempotency_key=f"k{n}")
    await stage.later(31 * DAY)
    assert (await stage.collect()).idempotency_keys == Amount(5)


# Old batches --------------------------------------------------------------------------------------------------------


async def cleared(stage, state=COMPLETED, **options):
    """An ended batch of which only its row, its job and that job's events are left."""
    batch = await stage.batch(state, **options)
    await stage.end_job(batch)
    await stage.later(HOUR + 1)
    await stage.collect()
    return batch


async def test_a_batch_is_removed_thirty_days_after_its_end_and_retention_removes_its_jobs(stage):
    retention = Retention(stage.queue.database, RetentionSettings())
    batch = await stage.batch(COMPLETED)
    claim = await stage.queue.claim_job("w1", batch.job_id, [PROCESS])
    good, bad = await hand_over(
        stage.queue, claim, [NewJob("noop", owner=batch.id) for _ in range(2)], on_join="resume", allow_failures=True
    )
    await succeed(stage.queue, await stage.queue.claim_job("w1", good, ["noop"]))
    await fail(stage.queue, await stage.queue.claim_job("w1", bad, ["noop"]))
    await stage.end_job(batch)
    output = await stage.upload()
    await stage.later(30 * DAY)
    await stage.collect()
    await sweep(stage, retention)
    assert len(await stage.queue.get_many([batch.job_id, good, bad])) == 3
    await stage.later(1)
    assert await stage.collect() == Collected(old_batches=Amount(1))
    with pytest.raises(NotFound):
        await stage.row(batch.id)
    jobs = await stage.queue.get_many([batch.job_id, good, bad])
    assert [job.owner for job in jobs] == [None] * 3
    assert [job.dismissed_at for job in jobs] == [None, None, stage.clock.time], (
        "the failed shard does not appear in the inbox"
    )
    await sweep(stage, retention)
    await sweep(stage, retention)
    assert await stage.queue.get_many([batch.job_id, good, bad]) == []
    assert await stage.files.get(output.id, tenant="acme") == output


async def sweep(stage, retention):
    has_more = True
    while has_more:
        async with stage.queue.database.transaction() as session:
            has_more = (await retention.sweep(session)).has_more


async def test_only_the_jobs_of_that_owner_are_disowned(queue):
    row = {"owner": "batch_a", "tenant": "acme"}
    prepare = Catalog(queue.database, Registry([process])).prepare
    root, chained, other = [
        NewJob(PROCESS, {"batch_id": "a"}, **{**row, "owner": owner}) for owner in ("batch_a", "batch_a", "batch_b")
    ]
    chained, other = replace(chained, pipeline_id=root.id), replace(other, pipeline_id=root.id)
    stranger = NewJob(PROCESS, {"batch_id": "a"}, **row)
    await queue.enqueue(await prepare([root, chained, other, stranger]))
    assert await queue.disown(root.id, "batch_a") == 2
    jobs = await queue.get_many([root.id, chained.id, other.id, stranger.id])
    assert [job.owner for job in jobs] == [None, None, "batch_b", "batch_a"]
    assert await queue.disown(root.id, "batch_a") == 0


async def test_a_collector_that_dies_after_disowning_the_jobs_removes_the_batch_the_next_time(stage, monkeypatch):
    batch = await cleared(stage)
    await stage.later(30 * DAY)
    with monkeypatch.context() as patch:
        die_at(patch, stage, None, "remove_batch")
        with pytest.raises(ConnectionResetError):
            await stage.collect()
    assert (await stage.row(batch.id)).status is COMPLETED
    assert (await stage.collect()).old_batches == Amount(1)
    assert (await stage.queue.get(batch.job_id)).owner is None


async def test_in_a_round_the_jobs_are_disowned_with_the_removal_of_the_batch_or_not_at_all(stage, monkeypatch):
    batch = await cleared(stage)
    await stage.later(30 * DAY)
    with monkeypatch.context() as patch:
        die_at(patch, stage, None, "remove_batch")
        with pytest.raises(ConnectionResetError):
            await stage.rounds()
    assert (await stage.queue.get(batch.job_id)).owner == batch.id
    await stage.rounds()
    with pytest.raises(NotFound):
        await stage.row(batch.id)
    assert (await stage.queue.get(batch.job_id)).owner is None


async def test_batches_are_kept_for_ever_if_jobs_are(stage):
    batch = await cleared(stage)
    await stage.later(20_000 * DAY)
    for_ever = stage.another_collector(RetentionSettings(ended_days=math.inf))
    assert await for_ever.collect(dry_run=False) == Collected()
    assert (await stage.row(batch.id)).status is COMPLETED


async def test_an_old_batch_stays_while_its_job_is_open(stage):
    batch = await stage.batch(COMPLETED)
    await stage.later(40 * DAY)
    dry = await stage.collect(dry_run=True)
    assert await stage.collect() == dry
    assert dry.old_batches == Amount()
    assert await status(stage.queue, batch.job_id) is JobStatus.QUEUED
    await stage.end_job(batch)
    assert (await stage.collect()).old_batches == Amount(1)


async def test_an_old_batch_stays_while_a_retry_of_it_is_open(stage):
    first = await cleared(stage)
    await stage.later(30 * DAY)
    retry = await stage.batch(VALIDATING, retry_of=first.id, family=first.id)
    assert (await stage.collect()).old_batches == Amount()
    await stage.batches.cancel(retry.id, tenant=None)
    await stage._end(retry.id, CANCELLED, 0, False, None)
    assert (await stage.collect()).old_batches == Amount(1)


async def test_a_batch_is_not_removed_before_its_objects_and_folders(stage):
    patient = stage.another_collector(failed_segments_kept_days=60)
    batch = await stage.batch(FAILED, files=False)
    await stage.leave_behind(batch)
    await stage.end_job(batch)
    await stage.later(59 * DAY)
    assert await patient.collect(dry_run=True) == await patient.collect(dry_run=False) == Collected()
    assert await stage.of_batch(batch) == (2, 1, True)
    await stage.later(2 * DAY)
    dry = await patient.collect(dry_run=True)
    assert await patient.collect(dry_run=False) == dry
    assert (dry.old_batches, dry.ended_batches) == (Amount(1), Amount(1))


# Rounds -------------------------------------------------------------------------------------------------------------


@in_both_stores
async def test_rounds_do_the_same_as_a_collection_by_hand(stage, caplog):
    foreseen = await scene(stage)
    with caplog.at_level(logging.INFO, logger=module.__name__):
        assert await stage.rounds() >= 10
    assert "garbage collected: deleted files: 2 (6 bytes)" in caplog.messages
    assert await stage.collect() == Collected()
    assert foreseen.deleted_files == Amount(2, 6)


async def test_upkeep_runs_the_rounds_until_nothing_is_left(stage):
    foreseen = await scene(stage)
    assert foreseen.deleted_files.count == 2
    upkeep = Upkeep(stage.queue, Processes(None, 0), Registry([]), stage.collector.rounds())
    for round in upkeep._rounds[-3:]:
        assert await upkeep.run_round(round)
    for _ in range(100):
        await upkeep.run_due()
        ((left,),) = await stage.queue.database.rows(
            "SELECT count(*) FROM batchwright.upkeep WHERE name = ANY(%(names)s) AND due_at <= ran_at",
            {"names": [round.name for round in upkeep._rounds[-3:]]},
        )
        if not left:
            break
    assert await stage.collect() == Collected()


async def test_an_unavailable_store_delays_only_what_needs_it(stage, monkeypatch, caplog):
    doomed = await stage.upload()
    await stage.delete(doomed)
    await stage.upload(expires_seconds=1)
    await stage.upload(idempotency_key="k")
    await stage.later(31 * DAY)

    async def away(*_):
        raise StorageUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "delete", away)
        with caplog.at_level(logging.WARNING):
            await stage.rounds()
    assert "garbage collection waits for the store or the disk: it is away" in caplog.messages
    assert await stage.has_row(doomed)
    assert (await stage.collect(dry_run=True)) == Collected(deleted_files=Amount(2, 6))
    await stage.rounds()
    assert not await stage.has_row(doomed)


async def test_a_store_that_hangs_ends_the_round_and_not_the_transaction(stage, monkeypatch, caplog):
    doomed = await stage.upload()
    await stage.delete(doomed)
    await stage.upload(idempotency_key="k")
    await stage.later(31 * DAY)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)

    async def hang(*_):
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "delete", hang)
        patch.setattr(stage.store, "sweep", hang)
        await stage.rounds(names=("garbage", "half-written objects"))
    assert caplog.messages == ["garbage collection waits for the store or the disk: no answer in time"] * 2
    assert await stage.has_row(doomed)
    assert await raw(stage.queue, "SELECT count(idempotency_key) FROM batchwright.file") == [(0,)]


async def test_an_object_that_cannot_be_deleted_does_not_prevent_the_removal_of_others(stage, monkeypatch, caplog):
    monkeypatch.setattr(module, "_FILES", 1)
    locked, free = await stage.upload(), await stage.upload()
    for file in (locked, free):
        await stage.delete(file)
        await stage.later(1)
    await stage.later(GRACE)
    delete = stage.store.delete

    async def refuse(*keys):
        if locked.key in keys:
            raise StorageError("it is locked")
        await delete(*keys)

    monkeypatch.setattr(stage.store, "delete", refuse)
    with caplog.at_level(logging.WARNING):
        await stage.rounds()
    assert "some garbage was not removed: it is locked" in caplog.messages
    assert (await stage.has_row(locked), await stage.has_row(free)) == (True, False)


@pytest.mark.parametrize("call", ["delete", "list"])
async def test_a_store_that_refuses_everything_gets_a_limited_number_of_calls(stage, monkeypatch, caplog, call):
    monkeypatch.setattr(module, "_FILES", 1)
    for _ in range(30):
        await stage.delete(await stage.upload())
    batches = [await stage.batch(COMPLETED) for _ in range(15)]
    for batch in batches:
        await stage.leave_behind(batch, folder=False)
    await stage.later(HOUR + 1)

    async def refuse(*_):
        raise StorageError("no permission")

    async def refuse_to_list(*_):
        raise StorageError("no permission")
        yield

    monkeypatch.setattr(stage.store, call, refuse if call == "delete" else refuse_to_list)
    with caplog.at_level(logging.WARNING):
        await stage.rounds()
    assert caplog.messages.count("some garbage was not removed: no permission") == {"delete": 20, "list": 13}[call]


async def test_a_chore_that_the_database_refuses_does_not_prevent_the_other_chores(stage, monkeypatch):
    await stage.upload(expires_seconds=1)
    await stage.upload(idempotency_key="k")
    await stage.later(31 * DAY)
    monkeypatch.setattr(module, "SQL", {**SQL, "expired_files": "SELECT nonsense"})
    (garbage, _, _) = stage.collector.rounds()
    with pytest.raises(DatabaseError):
        async with lock_round(stage.queue.database, garbage.name) as session:
            await garbage.run(session)
    for _ in range(7):
        async with lock_round(stage.queue.database, garbage.name) as session:
            await garbage.run(session)
    assert await raw(stage.queue, "SELECT count(idempotency_key) FROM batchwright.file") == [(0,)]


async def test_a_round_does_one_chore_and_ends_when_its_time_is_over(stage, monkeypatch):
    monkeypatch.setattr(module, "_FILES", 2)
    for _ in range(6):
        await stage.delete(await stage.upload())
    await stage.later(GRACE)
    monkeypatch.setattr(module, "_ROUND_SECONDS_MAX", 1.5)
    monkeypatch.setattr(module, "time", Steps())
    (garbage, _, _) = stage.collector.rounds()
    left = []
    for _ in range(5):
        async with lock_round(stage.queue.database, garbage.name) as session:
            assert await garbage.run(session) is True
        left.append(len(await stage.objects()))
    assert left == [6, 4, 2, 0, 0]


@in_both_stores
async def test_two_collectors_can_run_at_the_same_time(stage, pool):
    foreseen = await scene(stage)
    async with another(stage.queue, pool) as elsewhere:
        second = Collector(elsewhere, stage.store, stage.workspace, BatchSettings(), RetentionSettings())
        both = await asyncio.gather(stage.collect(), second.collect(dry_run=False))
    for kind in ("deleted_files", "batch_segments", "expired_files"):
        counts = [getattr(one, kind).count for one in both]
        assert sum(counts) == getattr(foreseen, kind).count, kind
    assert await stage.collect() == Collected()


async def test_half_written_objects_of_killed_writers_are_removed_every_hour(stage, tmp_path, caplog):
    drafts = tmp_path / "store" / ".drafts"
    drafts.mkdir(parents=True)
    for name in ("old", "new"):
        (drafts / name).write_bytes(b"half")
    os.utime(drafts / "old", (0, 0))
    await stage.collect(dry_run=True)
    assert len(list(drafts.iterdir())) == 2
    (half_written,) = [round for round in stage.collector.rounds() if round.name == "half-written objects"]
    assert half_written.every_seconds == HOUR
    with caplog.at_level(logging.INFO, logger=module.__name__):
        await half_written.run(stage.queue.database)
    assert caplog.messages == ["garbage collected: half written: 1"]
    os.utime(drafts / "new", (0, 0))
    assert await stage.collect() == Collected(half_written=Amount(1))


async def test_deletions_are_counted_as_the_collectors(stage, backend):
    counts = Counts([OPERATIONS])
    stage.store = Store(backend, counts=counts, component=COMPONENT)
    await stage.delete(await stage.upload())
    await stage.later(GRACE)
    await stage.another_collector().collect(dry_run=False)
    assert series(counts.flat())[OPERATIONS.name][("delete", "garbage-collector", "success")] == 1


# Dry run ------------------------------------------------------------------------------------------------------------


async def scene(stage):
    """Put in some of every kind, with something that must stay beside each; return what is to be removed."""
    old = await stage.batch(COMPLETED, idempotency_key="a", idempotency_digest=b"d")
    await stage.end_job(old)
    await stage.leave_behind(old, segments=2)
    await stage.upload(idempotency_key="b")
    await stage.upload(idempotency_key="c", expires_seconds=60)
    await stage.delete(await stage.upload())
    await stage.store.put(object_key(new_file_id()), b"12345")
    await stage.store.put(plan_key(f"batch_{'0' * 32}", "model_map.json"), b"12345")
    cancelled, _ = await stage.upload_in_parts(b"abc")
    await stage.uploads.cancel(cancelled, tenant="acme")
    await stage.upload_in_parts(b"abc")
    await stage.later(31 * DAY)
    await stage.upload_in_parts(b"kept")
    ended, kept, open = [await stage.batch(state) for state in (EXPIRED, COMPLETED, IN_PROGRESS)]
    repairable = await stage.batch(FAILED, files=False)
    await raw(
        stage.queue,
        "UPDATE batchwright.batch SET expired_at = expired_at - interval '2 hours' WHERE id = %(id)s",
        id=ended.id,
    )
    for batch in (ended, kept, open, repairable):
        await stage.leave_behind(batch)
    needed = await stage.upload()
    await stage.batch(IN_PROGRESS, input=needed)
    await stage.delete(needed)
    stage.folder(f"batch_{'0' * 32}", at=datetime(2020, 1, 1, tzinfo=UTC))
    await stage.upload(expires_seconds=0)
    return Collected(
        expired_files=Amount(2),
        deleted_files=Amount(2, 6),
        ended_batches=Amount(2),
        batch_objects=Amount(5, 25),
        batch_segments=Amount(3),
        work_folders=Amount(3, 15),
        upload_parts=Amount(2, 6),
        old_uploads=Amount(2),
        idempotency_keys=Amount(2),
        old_batches=Amount(1),
        unknown_objects=Amount(2, 10),
    )


async def everything(stage):
    """All rows, objects and files."""
    rows = [
        await raw(stage.queue, f"SELECT * FROM batchwright.{table} AS one ORDER BY one::text")
        for table in ("file", "batch", "batch_segment", "job", "job_event", "upload", "upload_part")
    ]
    paths = sorted(str(path) for path in stage.workspace.root.rglob("*"))
    return rows, await stage.objects(), paths


@in_both_stores
async def test_a_dry_run_changes_nothing_and_predicts_the_real_run(stage):
    foreseen = await scene(stage)
    before = await everything(stage)
    assert await stage.collect(dry_run=True) == foreseen
    assert await everything(stage) == before
    assert await stage.collect() == foreseen
    assert await everything(stage) != before
    assert await stage.collect(dry_run=True) == await stage.collect() == Collected()


async def test_a_dry_run_predicts_the_rest_of_a_collection_that_died(stage, monkeypatch):
    foreseen = await scene(stage)
    with monkeypatch.context() as patch:
        die_at(patch, stage, None, "remove_segments")
        with pytest.raises(ConnectionResetError):
            await stage.collect()
    dry = await stage.collect(dry_run=True)
    assert dry.batch_segments == foreseen.batch_segments
    assert dry.ended_batches == foreseen.ended_batches
    assert dry.batch_objects.count < foreseen.batch_objects.count
    assert await stage.collect() == dry


def test_a_collection_is_described_in_words():
    collected = Collected(deleted_files=Amount(2, 1024), idempotency_keys=Amount(3))
    assert str(collected) == "deleted files: 2 (1024 bytes), idempotency keys: 3"
    assert collected.bytes == 1024
    assert collected.by_kind()["deleted files"] == Amount(2, 1024)
    assert str(Collected()) == ""


# Plans --------------------------------------------------------------------------------------------------------------

CROWD = """
    INSERT INTO batchwright.file (id, tenant, purpose, filename, bytes, sha256, key, idempotency_key, created_at,
        expires_at, deleted_at)
    SELECT 'file-' || lpad(to_hex(n), 32, '0'), 'tenant ' || n % 50, 'batch', 'f', 1, repeat('0', 64), 'files/' || n,
        CASE WHEN n % 10 = 0 THEN 'key ' || n END, now() - interval '40 days',
        CASE WHEN n % 3 = 0 THEN now() - interval '10 days' + n * interval '1 minute' END,
        CASE WHEN n % 4 = 0 THEN now() - interval '9 days' + n * interval '1 second' END
    FROM generate_series(1, 20000) AS n;
    ALTER TABLE batchwright.batch DISABLE TRIGGER USER;
    INSERT INTO batchwright.batch (id, tenant, status, job_id, queue, priority, endpoint, input_file_id,
        completion_window, family, idempotency_key, created_at, expires_at, failed_at, total, segments_gone_at,
        leftovers_gone_at, retry_of)
    SELECT 'batch_' || lpad(to_hex(n), 32, '0'), 'tenant ' || n % 50,
        (CASE WHEN n % 20 = 0 THEN 'in_progress' ELSE 'failed' END)::batchwright.batch_status, gen_random_uuid(), 'q',
        5, '/v1/x', 'file-' || lpad(to_hex(n), 32, '0'), '24h', 'batch_' || lpad(to_hex(n), 32, '0'),
        CASE WHEN n % 10 = 0 THEN 'key ' || n END, now() - interval '40 days', now(),
        CASE WHEN n % 20 <> 0 THEN now() - interval '40 days' + n * interval '2 minutes' END, n % 2,
        CASE WHEN n % 20 <> 0 AND n < 19000 THEN now() END, CASE WHEN n % 20 <> 0 AND n < 19000 THEN now() END,
        CASE WHEN n % 40 = 0 THEN 'batch_' || lpad(to_hex(n - 1), 32, '0') END
    FROM generate_series(1, 20000) AS n;
    ALTER TABLE batchwright.batch ENABLE TRIGGER USER;
    INSERT INTO batchwright.batch_segment (batch_id, shard, claim, seq, host, start_byte, end_byte, lines, tally,
        registered_at)
    SELECT 'batch_' || lpad(to_hex(n % 100 + 1), 32, '0'), n, 1, 1, 'h', 0, 1, 1, '{}', now()
    FROM generate_series(1, 20000) AS n;
    INSERT INTO batchwright.upload (id, tenant, status, purpose, filename, mime_type, bytes, created_at, expires_at,
        over_at, parts_gone_at)
    SELECT 'upload_' || lpad(to_hex(n), 32, '0'), 'tenant ' || n % 50,
        (CASE WHEN n % 20 = 0 THEN 'pending' ELSE 'cancelled' END)::batchwright.upload_status, 'batch', 'f', 'm', 1,
        now(), now(), now() - interval '40 days' + n * interval '2 minutes',
        CASE WHEN n % 20 <> 0 AND n < 19000 THEN now() END
    FROM generate_series(1, 20000) AS n;
    INSERT INTO batchwright.upload_part (id, upload_id, bytes, key, created_at)
    SELECT 'part_' || lpad(to_hex(n), 32, '0'), 'upload_' || lpad(to_hex(n), 32, '0'), 1, 'uploads/' || n, now()
    FROM generate_series(1, 20000) AS n;
    VACUUM ANALYZE batchwright.file, batchwright.batch, batchwright.batch_segment, batchwright.upload,
        batchwright.upload_part;
"""
TABLES = {"file", "batch", "batch_segment", "job", "upload", "upload_part"}
ONE = f"batch_{1:032x}"


@pytest.fixture(scope="module")
def crowded_url(server, template):
    with database(server, "batchwright_test_garbage_" + template[-8:], template) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in CROWD.split(";\n"):
                if statement.strip():
                    connection.execute(statement)
        yield url


@pytest.fixture
def crowd(crowded_url):
    with psycopg.connect(crowded_url, **connect_arguments(DATABASE)) as connection:
        yield connection
        connection.rollback()


WALK = {
    "after": datetime(1, 1, 1, tzinfo=UTC),
    "after_id": "",
    "is_dry": False,
    "limit": 50,
    "kept_seconds": HOUR,
    "failed_kept_seconds": 7 * DAY,
    "grace_seconds": 600.0,
    "keep_seconds": 30 * DAY,
    "id": ONE,
    "ids": [ONE],
    "keys": ["files/1", "files/2"],
}
TEXT = {"after": "", "after_id": ""}
FILES_IDS = {"ids": [f"file-{n:032x}" for n in range(4, 44, 4)]}
UPLOAD_IDS = {"ids": [f"upload_{n:032x}" for n in range(1, 11)]}
STATEMENTS = {
    "expired_files": ({"file_expiring"}, {}),
    "delete_expired": ({"file_pkey"}, FILES_IDS),
    "deleted_files": ({"file_deleted", "batch_input"}, {}),
    "remove_files": ({"file_pkey"}, FILES_IDS),
    "let_segments_go": ({"batch_leftovers", "batch_pkey"}, {}),
    "leftovers": ({"batch_leftovers"}, {"is_dry": True}),
    "count_segments": ({"batch_segment_of_batch"}, {}),
    "remove_segments": ({"batch_segment_of_batch", "batch_segment_pkey"}, {}),
    "end_leftovers": ({"batch_pkey"}, {}),
    "known_batches": ({"batch_pkey"}, {}),
    "known_files": ({"file_key_key"}, {}),
    "keys_of_files": ({"file_idempotency"}, TEXT),
    "clear_keys_of_files": ({"file_pkey"}, FILES_IDS),
    "keys_of_batches": ({"batch_idempotency"}, TEXT),
    "clear_keys_of_batches": ({"batch_pkey"}, {}),
    "old_batches": ({"batch_ended", "job_pkey", "batch_family"}, {}),
    "remove_batch": ({"batch_pkey"}, {}),
    "expire": ({"upload_leftovers", "upload_pkey"}, {}),
    "upload_leftovers": ({"upload_leftovers"}, {}),
    "remove_parts": ({"upload_pkey", "upload_part_of_upload"}, {"id": f"upload_{1:032x}"}),
    "known_uploads": ({"upload_pkey"}, UPLOAD_IDS),
    "old_uploads": ({"upload_ended"}, {}),
    "remove_uploads": ({"upload_pkey"}, UPLOAD_IDS),
}


def test_the_plan_of_every_statement_is_tested():
    assert set(STATEMENTS) == set(SQL) - {"here"} | {"expire"}


@pytest.mark.parametrize("name", list(STATEMENTS))
def test_a_step_finds_its_rows_by_their_index_among_many(crowd, name):
    expected, values = STATEMENTS[name]
    found = plan(crowd, name, source=uploads.SQL if name == "expire" else SQL, run=True, **{**WALK, **values})
    scans = [node for node in nodes(found) if node["Node Type"] == "Seq Scan" and node["Relation Name"] in TABLES]
    assert scans == []
    assert expected <= indexes(found)
    assert touched(found) < 3_000


@pytest.mark.parametrize("name", ["deleted_files", "old_batches", "old_uploads"])
def test_a_step_of_a_dry_run_is_bounded_too(crowd, name):
    found = plan(crowd, name, source=SQL, run=True, **{**WALK, "is_dry": True})
    assert found["Actual Rows"] == 50
    assert touched(found) < 3_000


def test_a_scan_of_the_whole_table_would_be_detected(crowd):
    (found,) = crowd.execute(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT sum(total) FROM batchwright.batch"
    ).fetchone()
    assert touched(found[0]["Plan"]) > 300
    assert UUID(int=0) != crowd.execute("SELECT job_id FROM batchwright.batch LIMIT 1").fetchone()[0]
