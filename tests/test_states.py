"""The table in states.py, the database's trigger, the statements and the methods agree."""

import itertools
import re
import uuid

import psycopg
import pytest

from batchwright.batches.store import SQL as BATCHES_SQL
from batchwright.batches.store import Batches, Ending
from batchwright.engine.queue import SQL, Queue
from batchwright.errors import DatabaseError
from batchwright.files.uploads import SQL as UPLOADS_SQL
from batchwright.files.uploads import Uploads
from batchwright.ingest.items import SQL as ITEMS_SQL
from batchwright.ingest.items import Items
from batchwright.ingest.runs import SQL as RUNS_SQL
from batchwright.ingest.runs import Runs
from batchwright.providers.tasks import SQL as TASKS_SQL
from batchwright.providers.tasks import Tasks
from batchwright.states import (
    BATCH,
    ITEM,
    JOB,
    LIFECYCLES,
    RUN,
    TASK,
    UPLOAD,
    BatchStatus,
    ItemStatus,
    JobStatus,
    RunStatus,
    TaskStatus,
    UploadStatus,
)
from tests.engine.steps import claim_one, dead, hand_over, release, retry
from tests.support import allows, fail, put_one, raw, snooze, succeed, take_one, verbs

PAIRS = [pair for pair in itertools.product(JobStatus, JobStatus) if pair[0] != pair[1]]
LEGAL = [pair for pair in PAIRS if allows(JOB, *pair)]
ILLEGAL = [pair for pair in PAIRS if not allows(JOB, *pair)]
HELD = "locked_by = 'w', lease_until = now() + interval '1 minute'"
FREE = "locked_by = NULL, lease_until = NULL"

COLUMNS = {
    JobStatus.QUEUED: f"finished_at = NULL, {FREE}",
    JobStatus.RUNNING: f"finished_at = NULL, {HELD}",
    JobStatus.SUCCEEDED: f"finished_at = now(), {FREE}",
    JobStatus.FAILED: f"finished_at = now(), {FREE}",
    JobStatus.CANCELLED: f"finished_at = now(), {FREE}",
}
"""Columns that must change together with the status, so that a refusal can only be about the move."""

EVENTS = {
    "claim": "job.started",
    "cancel": "job.cancelled",
    "expire": "job.expired",
    "succeed": "job.succeeded",
    "join": "job.joined",
    "fail": "job.failed",
    "rescue": "job.rescued",
    "wait": "job.waited",
    "retry": "job.retried",
    "snooze": "job.retry_later",
    "release": "job.released",
    "recover": "job.recovered",
    "rerun": "job.rerun",
}
STORES = {
    "job": (SQL, Queue),
    "batch": (BATCHES_SQL, Batches),
    "upload": (UPLOADS_SQL, Uploads),
    "task": (TASKS_SQL, Tasks),
    "run": (RUNS_SQL, Runs),
    "item": (ITEMS_SQL, Items),
}
"""The statements that move each kind of object, and the class that runs them."""
VERBS = [(lifecycle.name, verb) for lifecycle in LIFECYCLES for verb in verbs(lifecycle)]
SETTLED = {("job", verb) for verb in ("succeed", "fail", "retry", "snooze", "release")}
"""Verbs that go through `Queue.settle`, which takes the verb's name."""
INSIDE = {("job", "join")}
"""Verbs that are not called directly: other verbs make these moves."""
PARAMETERS = {
    "anew": 0,
    "cause": "STEP:Fatal:broken",
    "error": "{}",
    "error_kind": "Fatal",
    "file_id": "file-1",
    "input_sha256": "",
    "limit": 10,
    "models": ["m"],
    "failed": 0,
    "part_ids": [],
    "progress": "{}",
    "message": "why",
    "provider_state": "{}",
    "reason": "user",
    "resends_max": 1,
    "succeeded": 0,
    "tenant": "default",
    "total": 1,
}
"""Parameters for the statements of batches, uploads, tasks, runs and items; any other parameter is null."""


async def move(queue, id, target):
    sql = f"UPDATE batchwright.job SET status = '{target}', {COLUMNS[target]} WHERE id = %(id)s RETURNING status::text"
    return await raw(queue, sql, id=id)


async def bring(queue, id, target):
    """Put a fresh row into this status by legal moves only."""
    if target is not JobStatus.QUEUED:
        await move(queue, id, JobStatus.RUNNING)
    if target in JOB.terminal:
        await move(queue, id, target)


async def test_the_database_allows_every_legal_move(queue):
    for source, target in LEGAL:
        id = await put_one(queue)
        await bring(queue, id, source)
        assert await move(queue, id, target) == [(target.value,)], f"{source} to {target}"


async def test_the_database_refuses_every_illegal_move(queue):
    for source, target in ILLEGAL:
        id = await put_one(queue)
        await bring(queue, id, source)
        with pytest.raises(DatabaseError, match=f"illegal move of job {id}: {source} to {target}"):
            await move(queue, id, target)
        assert (await queue.get(id)).status is source


def test_the_table_of_moves_is_the_one_of_the_design():
    by_pair = {}
    for one in JOB.moves:
        by_pair.setdefault((one.source.value, one.target.value), set()).add(one.verb)
    assert by_pair == {
        ("QUEUED", "RUNNING"): {"claim"},
        ("QUEUED", "CANCELLED"): {"cancel"},
        ("QUEUED", "FAILED"): {"expire"},
        ("RUNNING", "SUCCEEDED"): {"succeed", "join"},
        ("RUNNING", "FAILED"): {"fail", "expire", "rescue", "join"},
        ("RUNNING", "CANCELLED"): {"cancel"},
        ("RUNNING", "RUNNING"): {"wait"},
        ("RUNNING", "QUEUED"): {"retry", "snooze", "release", "rescue", "recover", "join"},
        ("FAILED", "QUEUED"): {"rerun"},
        ("CANCELLED", "QUEUED"): {"rerun"},
        ("FAILED", "RUNNING"): {"rerun"},
        ("CANCELLED", "RUNNING"): {"rerun"},
    }
    assert len(ILLEGAL) == 20 - len(LEGAL) == 9


def test_only_verbs_of_people_lead_out_of_a_terminal_state():
    assert {one.verb for one in JOB.moves if one.source in JOB.terminal} == {"rerun"}
    assert not any(one.source is JobStatus.SUCCEEDED for one in JOB.moves)


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_every_state_is_explained_and_can_be_reached(lifecycle):
    states = set(type(lifecycle.initial))
    assert set(lifecycle.meanings) == states
    assert all(meaning.endswith(".") for meaning in lifecycle.meanings.values())
    assert all(one.why for one in lifecycle.moves)
    assert {lifecycle.initial} | {one.target for one in lifecycle.moves} == states
    assert len({(one.verb, one.source, one.target) for one in lifecycle.moves}) == len(lifecycle.moves)


async def test_the_databases_enum_is_job_status(queue):
    rows = await raw(queue, "SELECT unnest(enum_range(NULL::batchwright.job_status))::text")
    assert [status for (status,) in rows] == [status.value for status in JobStatus]


async def test_a_new_job_can_only_be_queued(queue):
    await put_one(queue)
    for status in set(JobStatus) - {JobStatus.QUEUED}:
        finished = "now()" if status in JOB.terminal else "NULL"
        lock = "'w', now()" if status is JobStatus.RUNNING else "NULL, NULL"
        birth = (
            "INSERT INTO batchwright.job (id, job_type, queue, tenant, status, priority, run_after, payload, "
            "max_attempts, pipeline_id, created_at, finished_at, locked_by, lease_until) "
            f"SELECT gen_random_uuid(), 'noop', 'default', 'default', '{status}', 5, now(), '{{}}', "
            f"3, id, now(), {finished}, {lock} FROM batchwright.job"
        )
        with pytest.raises(DatabaseError, match=f"illegal move of job .*: nothing to {status}"):
            await raw(queue, birth)


@pytest.mark.parametrize(("name", "verb"), VERBS)
def test_every_verb_is_a_statement_and_a_method(name, verb):
    statements, store = STORES[name]
    assert verb in statements
    if (name, verb) in SETTLED:
        assert callable(store.settle)
    elif (name, verb) not in INSIDE:
        assert callable(getattr(store, verb))


@pytest.mark.parametrize("verb", verbs(JOB))
def test_every_verb_writes_its_event_in_its_own_statement(verb):
    assert f"'{EVENTS[verb]}'" in SQL[verb]


@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_nothing_but_the_verbs_writes_a_status(lifecycle):
    statements, _ = STORES[lifecycle.name]
    writers = {name for name, sql in statements.items() if "SET status" in sql or "status = verdict.status" in sql}
    assert writers == set(verbs(lifecycle)) | ({"expire_unstarted"} if lifecycle is BATCH else set())


async def test_the_events_of_the_verbs_as_they_are_written(queue, clock):
    """After each verb, the last event of the job has the verb's name and the status that it led to."""

    async def last(id):
        event = (await queue.events(id))[-1]
        return event.event, event.status

    async def fresh(**options):
        id = await put_one(queue, **options)
        return id, await claim_one(queue, id)

    seen = {}
    for verb, settle in (
        ("succeed", succeed),
        ("fail", fail),
        ("retry", retry),
        ("snooze", snooze),
        ("release", release),
    ):
        id, claim = await fresh()
        seen["claim"] = await last(id)
        await settle(queue, claim)
        seen[verb] = await last(id)
        await queue.cancel([id])
    id, claim = await fresh()
    await hand_over(queue, claim, 1)
    seen["wait"] = await last(id)
    await succeed(queue, await take_one(queue))
    seen["join"] = await last(id)
    id = await put_one(queue)
    await queue.cancel([id])
    seen["cancel"] = await last(id)
    await queue.rerun(id)
    seen["rerun"] = await last(id)
    await queue.cancel([id])
    id, claim = await fresh()
    await dead(queue, clock, claim)
    seen["rescue"] = await last(id)
    id, _ = await fresh()
    await clock.advance(queue, 31)
    await queue.recover(id)
    seen["recover"] = await last(id)
    id = await put_one(queue, deadline=clock.time)
    await queue.expire()
    seen["expire"] = await last(id)

    assert {verb: event for verb, (event, _) in seen.items()} == EVENTS
    for verb, (_, status) in seen.items():
        assert status in {one.target for one in JOB.moves if one.verb == verb}, verb


async def test_the_trigger_refuses_illegal_moves_from_any_database_client(queue, database_url):
    id = await put_one(queue)
    await succeed(queue, await take_one(queue))
    with (
        psycopg.connect(database_url) as stranger,
        pytest.raises(psycopg.errors.CheckViolation, match="illegal move") as refused,
    ):
        stranger.execute("UPDATE batchwright.job SET status = 'FAILED' WHERE id = %s", [id])
    assert refused.value.diag.constraint_name == "legal_moves"


PROMISES = {
    "finished_at = now()": "finished_means_terminal",
    "locked_by = 'w'": "lock_and_lease_go_together",
    "locked_by = 'w', lease_until = now()": "lease_only_while_held",
    "status = 'RUNNING'": "running_is_held_or_waits",
    "children_open = 1": "open_children_only_while_running",
    "is_current = true": "current_has_a_key",
    "attempts = -1": "job_attempts_check",
    "priority = 10": "job_priority_check",
}


async def test_constraints_of_the_database_protect_the_invariants_of_a_job(queue):
    await put_one(queue)
    for change, constraint in PROMISES.items():
        with pytest.raises(DatabaseError, match=constraint):
            await raw(queue, f"UPDATE batchwright.job SET {change}")


BATCH_PAIRS = [pair for pair in itertools.product(BatchStatus, BatchStatus) if pair[0] != pair[1]]
STAMPS = {status: f"{status.value}_at" for status in BATCH.terminal}


async def move_batch(queue, id, target):
    stamps = ", ".join(f"{stamp} = {'now()' if status is target else 'NULL'}" for status, stamp in STAMPS.items())
    sql = f"UPDATE batchwright.batch SET status = '{target}', {stamps} WHERE id = %(id)s RETURNING status::text"
    return await raw(queue, sql, id=id)


async def put_batch(queue):
    id = f"batch_{uuid.uuid4().hex}"
    await raw(
        queue,
        "INSERT INTO batchwright.batch (id, tenant, job_id, queue, priority, endpoint, input_file_id, "
        "completion_window, family, created_at, expires_at) VALUES (%(id)s, 'default', gen_random_uuid(), 'batches', "
        "5, '/v1/embeddings', 'file-1', '24h', %(id)s, now(), now() + interval '1 day') RETURNING id",
        id=id,
    )
    return id


async def bring_batch(queue, id, target):
    """Bring it to this status by legal moves only, along the shortest path."""
    ways = {BATCH.initial: ()}
    while target not in ways:
        ways |= {move.target: (*ways[move.source], move.target) for move in BATCH.moves if move.source in ways}
    for step in ways[target]:
        assert await move_batch(queue, id, step) == [(step.value,)]


async def test_the_database_allows_exactly_the_moves_of_a_batch_that_are_listed(queue):
    for source, target in BATCH_PAIRS:
        id = await put_batch(queue)
        await bring_batch(queue, id, source)
        if allows(BATCH, source, target):
            assert await move_batch(queue, id, target) == [(target.value,)]
        else:
            with pytest.raises(DatabaseError, match=f"illegal move of batch {id}: {source} to {target}"):
                await move_batch(queue, id, target)


def test_the_moves_of_a_batch_are_those_of_the_design():
    targets = {}
    for one in BATCH.moves:
        targets.setdefault(one.source.value, set()).add(one.target.value)
    assert targets == {
        "validating": {"in_progress", "failed", "expired", "cancelling"},
        "in_progress": {"finalizing", "expired", "failed", "cancelling"},
        "finalizing": {"in_progress", "completed", "failed", "cancelling"},
        "cancelling": {"cancelled", "failed"},
    }


async def apply(queue, sql, id):
    """Run the statement of a verb."""
    names = set(re.findall(r"%\((\w+)\)s", sql))
    return await raw(queue, sql, **{name: PARAMETERS.get(name) for name in names} | {"id": id})


def move_of(lifecycle, verb, source):
    """Where the verb leads from this state; None if the verb is not allowed in it."""
    return next((one.target for one in lifecycle.moves if (one.verb, one.source) == (verb, source)), source)


@pytest.mark.parametrize("verb", verbs(BATCH))
async def test_the_statement_of_each_verb_makes_exactly_the_moves_of_a_batch_that_are_listed(queue, verb):
    for source in BatchStatus:
        id = await put_batch(queue)
        await bring_batch(queue, id, source)
        await apply(queue, BATCHES_SQL[verb], id)
        target = move_of(BATCH, verb, source)
        assert await raw(queue, "SELECT status::text FROM batchwright.batch WHERE id = %(id)s", id=id) == [(target,)]


@pytest.mark.parametrize(
    ("verb", "status"),
    [
        ("complete", BatchStatus.CANCELLED),
        ("expire", BatchStatus.CANCELLED),
        ("end_cancelled", BatchStatus.CANCELLED),
        ("fail", BatchStatus.FAILED),
    ],
)
async def test_a_batch_that_a_user_cancels_while_it_ends_is_cancelled_unless_it_failed(queue, verb, status):
    """The cancellation may be committed after the transaction that ends the batch has begun."""
    batches, id = Batches(queue), await put_batch(queue)
    await bring_batch(queue, id, BatchStatus.CANCELLING)
    await raw(queue, "UPDATE batchwright.batch SET cancelling_at = now() + interval '1 minute' RETURNING id")
    counts = {"completed": 1, "failed": 2}
    assert await getattr(batches, verb)(id, Ending(counts=counts)) is status
    batch = await batches.get(id, tenant=None)
    assert (batch.status, batch.completed, batch.failed, batch.expired) == (status, 1, 2, 0)
    assert (batch.completed_at, batch.expired_at) == (None, None)
    assert batch.ended_at >= batch.cancelling_at or status is BatchStatus.FAILED
    assert await getattr(batches, verb)(id, Ending()) is None


async def test_the_databases_enum_is_batch_status(queue):
    rows = await raw(queue, "SELECT unnest(enum_range(NULL::batchwright.batch_status))::text")
    assert [status for (status,) in rows] == [status.value for status in BatchStatus]


async def put_upload(queue, status):
    id = f"upload_{uuid.uuid4().hex}"
    await raw(
        queue,
        "INSERT INTO batchwright.upload (id, tenant, purpose, filename, mime_type, bytes, created_at, expires_at, "
        "over_at) VALUES (%(id)s, 'default', 'batch', 'f', 'm', 1, now(), now(), now()) RETURNING id",
        id=id,
    )
    if status is not UPLOAD.initial:
        await move_upload(queue, id, status)
    return id


async def move_upload(queue, id, target):
    file = "'file-1', part_ids = '{}'" if target is UploadStatus.COMPLETED else "NULL, part_ids = NULL"
    sql = (
        f"UPDATE batchwright.upload SET status = '{target}', file_id = {file} WHERE id = %(id)s RETURNING status::text"
    )
    return await raw(queue, sql, id=id)


async def test_the_database_allows_exactly_the_moves_of_an_upload_that_are_listed(queue):
    for source, target in itertools.permutations(UploadStatus, 2):
        id = await put_upload(queue, source)
        if allows(UPLOAD, source, target):
            assert await move_upload(queue, id, target) == [(target.value,)]
        else:
            with pytest.raises(DatabaseError, match=f"illegal move of upload {id}: {source} to {target}"):
                await move_upload(queue, id, target)
    rows = await raw(queue, "SELECT unnest(enum_range(NULL::batchwright.upload_status))::text")
    assert [status for (status,) in rows] == [status.value for status in UploadStatus]


@pytest.mark.parametrize("verb", verbs(UPLOAD))
async def test_the_statement_of_each_verb_makes_exactly_the_moves_of_an_upload_that_are_listed(queue, verb):
    for source in UploadStatus:
        id = await put_upload(queue, source)
        ends_at = "now()" if verb == "expire" else "now() + interval '1 hour'"
        await raw(queue, f"UPDATE batchwright.upload SET over_at = {ends_at}, expires_at = {ends_at} RETURNING id")
        await apply(queue, UPLOADS_SQL[verb], id)
        target = move_of(UPLOAD, verb, source)
        assert await raw(queue, "SELECT status::text FROM batchwright.upload WHERE id = %(id)s", id=id) == [(target,)]


async def put_task(queue):
    id = f"task_{uuid.uuid4().hex}"
    await raw(
        queue,
        "INSERT INTO batchwright.task (id, tenant, task_type, targets, inputs, job_id, queue, priority, created_at, "
        "deadline_at) VALUES (%(id)s, 'default', 'completion', '[]', '[]', gen_random_uuid(), 'tasks/openai', 5, "
        "now(), now() + interval '1 day') RETURNING id",
        id=id,
    )
    return id


async def move_task(queue, id, target):
    ended = "now()" if target in TASK.terminal else "NULL"
    sql = (
        f"UPDATE batchwright.task SET status = '{target}', provider_state = '{{}}', ended_at = {ended} "
        "WHERE id = %(id)s RETURNING status::text"
    )
    return await raw(queue, sql, id=id)


async def bring_task(queue, id, target):
    """By legal moves only."""
    if target is not TaskStatus.PENDING:
        await move_task(queue, id, TaskStatus.IN_PROGRESS)
    if target in TASK.terminal:
        await move_task(queue, id, target)


async def test_the_database_allows_exactly_the_moves_of_a_task_that_are_listed(queue):
    for source, target in itertools.permutations(TaskStatus, 2):
        id = await put_task(queue)
        await bring_task(queue, id, source)
        if allows(TASK, source, target):
            assert await move_task(queue, id, target) == [(target.value,)]
        else:
            with pytest.raises(DatabaseError, match=f"illegal move of task {id}: {source} to {target}"):
                await move_task(queue, id, target)


def test_the_moves_of_a_task_are_those_of_the_design_and_a_cancellation():
    targets = {}
    for one in TASK.moves:
        targets.setdefault(one.source.value, set()).add(one.target.value)
    assert targets == {
        "PENDING": {"IN_PROGRESS", "FAILED", "CANCELLED"},
        "IN_PROGRESS": {"COMPLETED", "PARTIAL_COMPLETE", "FAILED", "CANCELLED"},
    }


@pytest.mark.parametrize("verb", verbs(TASK))
async def test_the_statement_of_each_verb_makes_exactly_the_moves_of_a_task_that_are_listed(queue, verb):
    for source in TaskStatus:
        id = await put_task(queue)
        await bring_task(queue, id, source)
        await apply(queue, TASKS_SQL[verb], id)
        target = move_of(TASK, verb, source)
        assert await raw(queue, "SELECT status::text FROM batchwright.task WHERE id = %(id)s", id=id) == [(target,)]


async def test_a_task_in_progress_has_a_state_and_an_ended_one_a_time(queue):
    id = await put_task(queue)
    for change, constraint in {
        "status = 'IN_PROGRESS'": "progress_means_a_state",
        "ended_at = now()": "ended_means_a_last_status",
        "status = 'FAILED'": "ended_means_a_last_status",
    }.items():
        with pytest.raises(DatabaseError, match=constraint):
            await raw(queue, f"UPDATE batchwright.task SET {change} WHERE id = %(id)s", id=id)


async def put_run(queue):
    id = f"run_{uuid.uuid4().hex}"
    await raw(
        queue,
        "WITH collection AS (INSERT INTO batchwright.ingest_collection (tenant, name, created_at) "
        "VALUES ('default', %(id)s, now()) RETURNING id) "
        "INSERT INTO batchwright.ingest_run (id, tenant, collection_id, kind, sources, config, recipe, lane, priority, "
        "job_id, created_at) SELECT %(id)s, 'default', id, 'folder', '[]', '{}', '', 'auto', 5, gen_random_uuid(), "
        "now() FROM collection RETURNING id",
        id=id,
    )
    return id


async def move_run(queue, id, target):
    ended = "now()" if target in RUN.terminal else "NULL"
    parked = "'user'" if target is RunStatus.PARKED else "NULL"
    sql = (
        f"UPDATE batchwright.ingest_run SET status = '{target}', ended_at = {ended}, parked_reason = {parked} "
        "WHERE id = %(id)s RETURNING status::text"
    )
    return await raw(queue, sql, id=id)


async def bring_run(queue, id, target):
    """By legal moves only."""
    if target is not RunStatus.PENDING:
        await move_run(queue, id, RunStatus.RUNNING)
    if target not in (RunStatus.PENDING, RunStatus.RUNNING):
        await move_run(queue, id, target)


async def test_the_database_allows_exactly_the_moves_of_a_run_that_are_listed(queue):
    for source, target in itertools.permutations(RunStatus, 2):
        id = await put_run(queue)
        await bring_run(queue, id, source)
        if allows(RUN, source, target):
            assert await move_run(queue, id, target) == [(target.value,)]
        else:
            with pytest.raises(DatabaseError, match=f"illegal move of run {id}: {source} to {target}"):
                await move_run(queue, id, target)
    rows = await raw(queue, "SELECT unnest(enum_range(NULL::batchwright.run_status))::text")
    assert [status for (status,) in rows] == [status.value for status in RunStatus]


@pytest.mark.parametrize("verb", verbs(RUN))
async def test_the_statement_of_each_verb_makes_exactly_the_moves_of_a_run_that_are_listed(queue, verb):
    for source in RunStatus:
        id = await put_run(queue)
        await bring_run(queue, id, source)
        sql = RUNS_SQL[verb].replace("%(job_id)s", "gen_random_uuid()")
        await apply(queue, sql, id)
        target = move_of(RUN, verb, source)
        assert await raw(queue, "SELECT status::text FROM batchwright.ingest_run WHERE id = %(id)s", id=id) == [
            (target,)
        ]


async def put_item(queue):
    run_id, id = await put_run(queue), f"item_{uuid.uuid4().hex}"
    await raw(
        queue,
        "INSERT INTO batchwright.ingest_item (id, run_id, tenant, collection_id, document_id, source, name, job_ids, "
        "created_at) SELECT %(id)s, run.id, 'default', run.collection_id, 1, 'file:///a', 'a', "
        "ARRAY[gen_random_uuid()], now() FROM batchwright.ingest_run AS run WHERE run.id = %(run_id)s RETURNING id",
        id=id,
        run_id=run_id,
    )
    return id, run_id


async def move_item(queue, id, target):
    ended = "now()" if target in ITEM.terminal else "NULL"
    sql = (
        f"UPDATE batchwright.ingest_item SET status = '{target}', ended_at = {ended}, last_error_kind = 'Fatal', "
        "cause = 'STEP:Fatal:broken' WHERE id = %(id)s RETURNING status::text"
    )
    return await raw(queue, sql, id=id)


async def test_the_database_allows_exactly_the_moves_of_an_item_that_are_listed(queue):
    for source, target in itertools.permutations(ItemStatus, 2):
        id, _ = await put_item(queue)
        if source is not ITEM.initial:
            await move_item(queue, id, source)
        if allows(ITEM, source, target):
            assert await move_item(queue, id, target) == [(target.value,)]
        else:
            with pytest.raises(DatabaseError, match=f"illegal move of item {id}: {source} to {target}"):
                await move_item(queue, id, target)
    rows = await raw(queue, "SELECT unnest(enum_range(NULL::batchwright.item_status))::text")
    assert [status for (status,) in rows] == [status.value for status in ItemStatus]


@pytest.mark.parametrize("verb", verbs(ITEM))
async def test_the_statement_of_each_verb_makes_exactly_the_moves_of_an_item_that_are_listed(queue, verb):
    """It also counts the items in the run."""
    for source in ItemStatus:
        id, run_id = await put_item(queue)
        if source is not ITEM.initial:
            await move_item(queue, id, source)
        await raw(queue, COUNT_ITEMS, run_id=run_id)
        names = set(re.findall(r"%\((\w+)\)s", ITEMS_SQL[verb]))
        given = {name: PARAMETERS.get(name) for name in names} | {"id": id, "run_id": run_id, "ids": [id]}
        given |= {"cause": None, "only_inbox": False, "only_latest": False} if verb == "retry" else {}
        await raw(queue, ITEMS_SQL[verb], **{name: given[name] for name in names})
        target = move_of(ITEM, verb, source)
        assert await raw(queue, "SELECT status::text FROM batchwright.ingest_item WHERE id = %(id)s", id=id) == [
            (target,)
        ]
        counts = await raw(queue, f"SELECT {COUNTERS} FROM batchwright.ingest_run WHERE id = %(id)s", id=run_id)
        expected = tuple(int(target is one) for one in COUNTED)
        assert counts == [expected]


COUNTED = (ItemStatus.DONE, ItemStatus.UNCHANGED, ItemStatus.FAILED, ItemStatus.CANCELLED)
COUNTERS = ", ".join(f"item_count_{status.value.lower()}" for status in COUNTED)
COUNT_ITEMS = (
    "UPDATE batchwright.ingest_run SET "
    + ", ".join(
        f"item_count_{status.value.lower()} = (SELECT count(*) FROM batchwright.ingest_item AS item "
        f"WHERE item.run_id = ingest_run.id AND item.status = '{status}')"
        for status in COUNTED
    )
    + " WHERE id = %(run_id)s RETURNING id"
)


async def test_a_parked_run_has_a_reason_and_a_failed_item_has_an_error(queue):
    id, run_id = await put_item(queue)
    await move_run(queue, run_id, RunStatus.RUNNING)
    for table, key, change, constraint in (
        ("ingest_run", run_id, "status = 'PARKED'", "parked_means_a_reason"),
        ("ingest_run", run_id, "parked_reason = 'user'", "parked_means_a_reason"),
        ("ingest_run", run_id, "status = 'COMPLETED'", "run_ended_means_a_last_status"),
        ("ingest_item", id, "status = 'FAILED', ended_at = now()", "failed_means_an_error"),
        ("ingest_item", id, "status = 'DONE'", "item_ended_means_a_last_status"),
    ):
        with pytest.raises(DatabaseError, match=constraint):
            await raw(queue, f"UPDATE batchwright.{table} SET {change} WHERE id = %(id)s", id=key)
