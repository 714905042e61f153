"""`batchwright inbox …`."""

from __future__ import annotations

import re

from batchwright import NewJob
from tests.cli.conftest import Inside
from tests.cli.sample import fail
from tests.cli.stage import Stage


def test_the_inbox_shows_groups_and_what_to_do(inside: Inside, stage: Stage) -> None:
    assert inside("inbox") == (0, "", "the inbox is empty: no failed jobs\n")
    ids = stage.failed(2)
    (other,) = stage.put()
    stage.fail(other, code="no_ink")
    code, out, err = inside("inbox")
    lines = out.splitlines()
    assert (code, lines[0].split()) == (0, ["failed", "last", "code", "type", "message"])
    assert re.match(r" +2  \d+ s ago  no_paper +sample.fail", lines[1])
    assert lines[1].rstrip().endswith("it broke")
    assert "batchwright inbox rerun | dismiss --type NAME [--code CODE]" in err
    assert re.match(r" +1  \d+ s ago  no_ink +sample.greet", inside("inbox", "list")[1].splitlines()[2])
    first, second = inside.json("inbox")
    assert (first["count"], sorted(first["samples"]), first["is_retryable"]) == (2, sorted(map(str, ids)), False)
    assert second["code"] == "no_ink"
    assert [one["job_type"] for one in inside.json("inbox", "--type", "sample.fail")] == ["sample.fail"]
    assert inside.json("inbox", "list", "--type", "sample.greet") == [second]
    assert inside.json("inbox", "list", "--tenant", "b") == []
    assert len(inside.json("inbox", "list", "--limit", "1")) == 1


def test_a_group_is_rerun_and_what_fails_again_is_back(inside: Inside, stage: Stage) -> None:
    ids = stage.failed(3)
    (other,) = stage.put(NewJob(fail))
    stage.fail(other, code="no_ink")
    group = ["--type", "sample.fail", "--code", "no_paper"]
    assert inside("inbox", "rerun", *group, "--dry-run") == (0, "would rerun 3 jobs\n", "")
    assert inside("inbox", "rerun", *group)[2].startswith(
        "error: there is no terminal to confirm on; add --yes to rerun"
    )
    assert inside("inbox", "rerun", *group, "--yes") == (0, "rerun 3 jobs\n", "")
    assert [stage.status(id) for id in (*ids, other)] == ["QUEUED"] * 3 + ["FAILED"]
    stage.fail(ids[0])
    assert [one["count"] for one in inside.json("inbox")] == [1, 1]


def test_a_group_is_dismissed_and_stays_failed(inside: Inside, stage: Stage) -> None:
    ids = stage.failed(2)
    assert inside.json("inbox", "dismiss", "--type", "sample.fail", "--dry-run")["matched"] == 2
    assert inside.json("inbox", "dismiss", "--type", "sample.fail", "--yes")["changed"] == 2
    assert inside.json("inbox") == []
    assert {stage.status(id) for id in ids} == {"FAILED"}
    assert "nothing to rerun" in inside("inbox", "rerun", "--type", "sample.fail", "--yes")[1], "they are gone"
    assert "dismissed" in inside("job", "show", str(ids[0]))[1]


def test_a_group_must_be_named_and_options_stand_behind_the_command(inside: Inside, stage: Stage) -> None:
    (id,) = stage.failed(1)
    assert inside("inbox", "rerun", "--yes") == (
        2,
        "",
        "error: Missing option '--type'. See: batchwright inbox rerun --help\n",
    )
    code, out, err = inside("inbox", "--type", "sample.fail", "rerun", "--type", "sample.fail", "--yes")
    assert (code, out) == (1, "")
    assert err == "error: put the options after the command: batchwright inbox rerun --type NAME\n"
    assert stage.status(id) == "FAILED"
