"""A database and a folder of the previous version, left in the middle of a batch: today's workers finish everything.

`make.py` made the fixture with that version, whose workers were killed. What is in it: a batch with registered answers
and with others in the tails of its journals, jobs in every state, a waiting parent, a schedule, an upload, a key.
"""

from __future__ import annotations

import asyncio
import json
import re
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg

from batchwright.engine.jobs import job_id
from batchwright.states import BatchStatus, JobStatus
from tests.batches.stage import Stage, staged
from tests.support import finished
from tests.upgrade import jobs

HERE = Path(__file__).parent
AWAY_SECONDS = 120
"""The time without workers: leases, delays and a tick of the schedule are over, but not the upload and the batch."""
LINE = re.compile(rb'\{"id":"[^"]+","custom_id":"[^"]+".*\}\n')
QUICK = {"lease_seconds": 5.0, "rescue_jitter_seconds": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What the previous version has left, as make.py recorded it, and the answers in its journals."""

    made: dict[str, Any]
    registered: dict[str, dict[str, Any]]
    tail: dict[str, dict[str, Any]]


@asynccontextmanager
async def resumed(database_url: str, folder: Path) -> AsyncIterator[tuple[Stage, Left]]:
    """The fixture in a database and a folder of this test, with a new simulator."""
    made, rows = _read()
    with tarfile.open(HERE / "folder.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    _load(database_url, made, rows)
    async with staged(database_url, folder, engine=QUICK) as stage:
        for function in (jobs.note, jobs.spoil, jobs.linger, jobs.family):
            stage.batchwright.operations.add(function)
        yield stage, _left(folder, made, rows)


def _read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    made, *rows = map(json.loads, (HERE / "rows.jsonl").read_text(encoding="utf-8").splitlines())
    return made, rows


def _load(database_url: str, made: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Insert the rows of the fixture, with all times moved by its age."""
    with psycopg.connect(database_url) as database:
        ((now,),) = database.execute("SELECT now()").fetchall()
        later = now - datetime.fromisoformat(made["made_at"]) - timedelta(seconds=AWAY_SECONDS)
        for table in dict.fromkeys(row["table"] for row in rows):
            times = _times(database, table)
            database.execute(f"ALTER TABLE batchwright.{table} DISABLE TRIGGER USER")  # the triggers only accept moves
            for row in (one["row"] for one in rows if one["table"] == table):
                moved = {
                    name: (datetime.fromisoformat(row[name]) + later).isoformat() for name in times if row.get(name)
                }
                columns = ", ".join(row)  # newer columns get their defaults, as in a migration
                database.execute(
                    f"INSERT INTO batchwright.{table} ({columns}) OVERRIDING SYSTEM VALUE "
                    f"SELECT {columns} FROM jsonb_populate_record(NULL::batchwright.{table}, %s::jsonb)",
                    [json.dumps(row | moved)],
                )
            database.execute(f"ALTER TABLE batchwright.{table} ENABLE TRIGGER USER")
            _move_sequences(database, table)


def _times(database: psycopg.Connection[Any], table: str) -> list[str]:
    sql = """SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND atttypid = 'timestamptz'::regtype
             AND attnum > 0 AND NOT attisdropped"""
    return [name for (name,) in database.execute(sql, [f"batchwright.{table}"])]


def _move_sequences(database: psycopg.Connection[Any], table: str) -> None:
    """Set the sequences past the used numbers, as in the database of the fixture."""
    sql = """SELECT attname, pg_get_serial_sequence(%(table)s, attname) FROM pg_attribute
             WHERE attrelid = %(table)s::regclass AND attnum > 0 AND NOT attisdropped
               AND pg_get_serial_sequence(%(table)s, attname) IS NOT NULL"""
    for column, sequence in database.execute(sql, {"table": f"batchwright.{table}"}).fetchall():
        database.execute(f"SELECT setval('{sequence}', max({column})) FROM batchwright.{table}")


def _left(folder: Path, made: dict[str, Any], rows: list[dict[str, Any]]) -> Left:
    ends = {
        f"{row['row']['shard']}.{row['row']['claim']}.seg": row["row"]["end_byte"]
        for row in rows
        if row["table"] == "batch_segment"
    }
    registered: dict[str, dict[str, Any]] = {}
    tail: dict[str, dict[str, Any]] = {}
    for journal in (folder / "work" / made["batch"]).glob("*.seg"):
        for found in LINE.finditer(journal.read_bytes()):
            line = json.loads(found[0])
            part = registered if found.start() < ends.get(journal.name, 0) else tail
            part[line["custom_id"]] = line
    return Left(made=made, registered=registered, tail=tail)


async def test_todays_workers_finish_the_work_of_the_previous_version(database_url, tmp_path):
    async with resumed(database_url, tmp_path) as (stage, left):
        assert len(left.registered) >= 10, "the fixture must have registered answers"
        assert len(left.tail) >= 10, "the fixture must have answers that are only in the journals"
        stage.work()
        async with asyncio.timeout(60):
            await _batch_completes_and_asks_nothing_twice(stage, left)
            await _jobs_go_on(stage, left.made["jobs"])
            await _schedule_fires(stage)
        async with _client(stage, left.made["key"]) as http:
            await _key_opens_the_api(http, left.made)
            await _upload_is_completed(http, left.made["upload"])


async def _batch_completes_and_asks_nothing_twice(stage: Stage, left: Left) -> None:
    batch = await stage.ended(left.made["batch"])
    output, errors = await stage.results(batch)
    ids = [f"r{n}" for n in range(left.made["requests"])]
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, len(ids), 0)
    assert [line["custom_id"] for line in output] == ids
    assert errors == []
    kept = left.registered | left.tail
    assert {line["custom_id"]: line for line in output if line["custom_id"] in kept} == kept
    assert stage.simulator.stats()["received"] == len(ids) - len(kept)


async def _jobs_go_on(stage: Stage, ids: dict[str, Any]) -> None:
    queue = stage.batchwright.queue
    found = {name: await finished(queue, job_id(id)) for name, id in ids.items()}
    assert {name: job.status for name, job in found.items()} == {
        "done": JobStatus.SUCCEEDED,
        "failed": JobStatus.FAILED,
        "held": JobStatus.SUCCEEDED,
        "parent": JobStatus.SUCCEEDED,
        "later": JobStatus.SUCCEEDED,
        "cancelled": JobStatus.CANCELLED,
    }
    assert found["held"].result == "after a death"
    assert found["parent"].result == "all are back"
    assert found["failed"].error["code"] == "no_paper"
    await stage.batchwright.rerun(ids["failed"])
    assert (await finished(queue, job_id(ids["failed"]))).error["code"] == "no_paper"
    events = [event.event for event in await stage.batchwright.events(ids["held"])]
    assert events[:2] == ["job.enqueued", "job.started"]
    assert events[-3:] == ["job.rescued", "job.started", "job.succeeded"]


async def _schedule_fires(stage: Stage) -> None:
    while (schedule := await stage.batchwright.schedules.get("minutely")).last_job_id is None:
        await asyncio.sleep(0.05)
    job = await finished(stage.batchwright.queue, schedule.last_job_id)
    assert (job.job_type, job.result) == ("note", "tick")


@asynccontextmanager
async def _client(stage: Stage, key: str) -> AsyncIterator[httpx.AsyncClient]:
    server = await stage.batchwright.server()
    server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {key}"}) as http:
            yield http
    finally:
        await server.close()


async def _key_opens_the_api(http: httpx.AsyncClient, made: dict[str, Any]) -> None:
    batch = (await http.get(f"/v1/batches/{made['batch']}")).json()
    assert batch["request_counts"] == {"total": made["requests"], "completed": made["requests"], "failed": 0}
    lines = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    assert len(lines) == made["requests"]
    assert (await http.get("/v1/batches", headers={"Authorization": "Bearer bw_other"})).status_code == 401


async def _upload_is_completed(http: httpx.AsyncClient, upload: dict[str, Any]) -> None:
    path = f"/v1/uploads/{upload['id']}"
    part = (await http.post(f"{path}/parts", files={"data": ("part", upload["pieces"][1].encode())})).json()["id"]
    answer = await http.post(f"{path}/complete", json={"part_ids": [upload["part"], part]})
    assert answer.status_code == 200, answer.text
    content = await http.get(f"/v1/files/{answer.json()['file']['id']}/content")
    assert content.text == "".join(upload["pieces"])
