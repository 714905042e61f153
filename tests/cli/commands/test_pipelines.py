"""`batchwright pipeline …`."""

from __future__ import annotations

import uuid

import orjson
import pytest

from batchwright import NewJob
from tests.cli.conftest import SAMPLE, Cli, Inside
from tests.cli.sample import family, greet
from tests.cli.stage import Stage


def test_a_pipeline_is_shown_with_its_steps_and_its_jobs(inside: Inside, stage: Stage) -> None:
    (root,) = stage.put(NewJob(family, {"children": 2}))
    one, two = stage.hand_over(root, 2)
    follower = stage.chain(one, NewJob(greet, {"name": "Ada"}))
    said = inside("pipeline", "show", str(root))[1]
    lines = said.splitlines()
    assert next(line for line in lines if line.startswith("status")).split() == ["status", "RUNNING"]
    assert "2 queued · 1 running · 1 succeeded" in next(line for line in lines if line.startswith("jobs"))
    head = next(n for n, line in enumerate(lines) if line.split()[-1:] == ["type"])
    assert lines[head].split() == ["queued", "running", "succeeded", "type"]
    assert [line.split() for line in lines[head + 1 : head + 3]] == [
        ["1", "sample.family"],
        ["2", "1", "sample.greet"],
    ]
    for id in (root, one, two, follower):
        assert str(id) in said
    short = inside("pipeline", "show", str(root), "--jobs", "1")[1]
    assert short.splitlines()[-1] == f"the newest 1 of 4; see: batchwright job list --pipeline {root} --limit 4"


def test_a_pipeline_as_json_has_its_counts_and_why_its_jobs_wait(inside: Inside, stage: Stage) -> None:
    (root,) = stage.put()
    follower = stage.chain(root, NewJob(greet, tenant="ignored"))
    found = inside.json("pipeline", "show", str(root), "--tenant", "default")
    assert (found["id"], found["status"], found["finished_at"]) == (str(root), "RUNNING", None)
    assert found["counts"] == {"QUEUED": 1, "SUCCEEDED": 1}
    assert found["steps"] == [{"job_type": "sample.greet", "counts": {"QUEUED": 1, "SUCCEEDED": 1}}]
    assert [job["id"] for job in found["jobs"]] == [str(follower), str(root)]
    assert [one["reason"] for one in found["jobs"][0]["waiting_on"]] == ["no_worker"]


def test_a_pipeline_is_cancelled_whole(inside: Inside, stage: Stage) -> None:
    (root,) = stage.put(NewJob(family, {"children": 2}))
    children = stage.hand_over(root, 2)
    assert inside("pipeline", "cancel", str(root), "--reason", "not today") == (0, "cancelled 3 jobs\n", "")
    assert {stage.status(id) for id in (root, *children)} == {"CANCELLED"}
    assert inside.json("pipeline", "cancel", str(root)) == {"cancelled": 0}
    assert "nothing to cancel: already ended" in inside("pipeline", "cancel", str(root))[1]


def test_one_that_is_not_there_is_named(inside: Inside, stage: Stage) -> None:
    (root,) = stage.put()
    for arguments in (["show", str(uuid.uuid4())], ["cancel", str(root), "--tenant", "b"], ["show", "here"]):
        code, out, err = inside("pipeline", *arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
    assert stage.status(root) == "QUEUED"


@pytest.mark.thorough
def test_watching_ends_with_the_pipeline(cli: Cli, publish: None) -> None:
    id = cli("job", "submit", "sample.family", "-p", '{"children": 3}').stdout.strip()
    with cli.start("worker", SAMPLE):
        lines = cli("pipeline", "show", id, "--watch").stdout.splitlines()
    assert lines[-1].split()[1:] == ["SUCCEEDED", "4", "succeeded"]
    last = orjson.loads(cli("pipeline", "show", id, "--watch", "--json").stdout.splitlines()[-1])
    assert (last["status"], last["counts"]) == ("SUCCEEDED", {"SUCCEEDED": 4})


def test_watching_a_pipeline_that_failed_or_was_cancelled_leaves_with_its_code(inside: Inside, stage: Stage) -> None:
    (bad,) = stage.failed(1)
    assert inside("pipeline", "show", str(bad), "--watch")[0] == 1
    (gone,) = stage.put()
    inside("pipeline", "cancel", str(gone))
    assert inside("pipeline", "show", str(gone), "--watch")[0] == 3
