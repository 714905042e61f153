"""`batchwright workers` and `batchwright operations`."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

import pytest

from batchwright.app import AsyncBatchwright
from batchwright.cli.commands.banner import banner_lines
from batchwright.db.database import complete
from batchwright.engine.views import OperationView
from batchwright.settings import load_settings
from tests.cli.conftest import Inside
from tests.cli.stage import Stage


def test_workers_are_listed_with_their_last_heartbeat(inside: Inside, stage: Stage) -> None:
    assert inside("workers") == (0, "", "no workers; start one: batchwright up, or batchwright worker\n")
    stage.worker("w1")
    stage.worker("w2", stopping=True, pid=8, queues=["gpu", "slow"], operations=["sample.greet"])
    stage.worker("w3", pid=9)
    complete(stage.queue.database.rows("UPDATE batchwright.worker SET heartbeat_at = '2020-01-01' WHERE id = 'w3'"))
    lines = [line.split() for line in inside("workers")[1].splitlines()]
    assert lines[0] == ["host", "pid", "state", "running", "heartbeat", "up", "version", "operations", "queues"]
    assert lines[1][:4] == ["here", "7", "alive", "1/2"]
    assert lines[1][-3:] == ["1.2", "6", "all"]
    assert (lines[2][2], lines[2][-3:]) == ("stopping", ["1", "gpu,", "slow"])
    assert lines[3][2] == "silent"
    found = inside.json("workers")
    assert [one["is_alive"] for one in found] == [True, True, False]
    assert (found[0]["host"], found[0]["pid"], found[0]["concurrency"]) == ("here", 7, 2)


def test_operations_are_listed_with_their_workers(inside: Inside, stage: Stage) -> None:
    stage.worker(operations=["sample.greet"])
    lines = [line.split() for line in inside("operations")[1].splitlines()]
    assert lines[0] == ["operation", "tries", "workers", "queue", "description"]
    assert ["sample.greet", "3", "1", "default"] in lines
    assert ["sample.linger", "1", "0", "default", "Never", "ends", "by", "itself."] in lines
    assert {one["name"]: one["workers"] for one in inside.json("operations")}["sample.fail"] == 0


def test_an_operation_is_shown_with_its_payload_and_a_command_that_runs(inside: Inside, stage: Stage) -> None:
    said = inside("operations", "sample.family")[1]
    assert ["children", "integer", "required"] in [line.split() for line in said.splitlines()]
    command = shlex.split(said.splitlines()[-1])
    assert command[:4] == ["batchwright", "job", "submit", "sample.family"]
    assert inside(*command[1:-1])[0] == 0, "the printed command must not contain --watch"
    greet = inside("operations", "sample.greet")[1]
    assert ["name", "string", '"you"'] in [line.split() for line in greet.splitlines()]
    assert greet.splitlines()[-1] == "batchwright job submit sample.greet --watch"
    assert inside.json("operations", "sample.greet")["payload_schema"]["properties"]["name"]["type"] == "string"


def test_an_operation_that_is_not_there_is_named(inside: Inside, stage: Stage) -> None:
    assert inside("operations", "sample.great") == (
        1,
        "",
        "error: no worker has published the operation 'sample.great'; did you mean 'sample.greet'?\n",
    )


def test_without_any_operation_the_message_says_what_to_do(inside: Inside) -> None:
    said = inside("operations")[2]
    assert said == "no operations; start a worker that has some: batchwright up hello.py\n"


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["batch.process", "batch.shard"], "batchwright batch submit FILE --wait"),
        (["batch.process", "greet"], "batchwright job submit greet --watch"),
    ],
)
async def test_a_worker_at_its_start_prints_what_can_be_submitted(
    database_url: str, names: list[str], hint: str
) -> None:
    flags = {"database": {"url": database_url}, "global_inference_gateway": {"url": "http://127.0.0.1:9"}}
    facts = {"description": None, "payload_schema": {}, "defaults": {}, "published_at": datetime.now(UTC), "workers": 1}
    async with AsyncBatchwright(settings=load_settings(flags, environment={})) as batchwright:
        operations = [OperationView(name=name, **facts) for name in names]
        said = dict(banner_lines(batchwright, operations, url=None, has_key=False, processes=1))
    assert said["submit"] == hint
