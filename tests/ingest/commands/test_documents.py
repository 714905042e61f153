"""`batchwright ingest show, items, item, inbox, retry, dismiss` and what `batchwright inbox` and `check` say."""

from __future__ import annotations

import pytest

from tests.ingest.commands.conftest import Shell
from tests.ingest.documents import make_encrypted_pdf, make_pdf, make_scan

WHALES = "# Whales\n\nWhales are mammals that live in the sea.\n"


@pytest.fixture
def run(shell: Shell) -> str:
    """A run with a good document and three bad ones, of two causes."""
    shell.write("whales.md", WHALES)
    shell.write("one.pdf", make_encrypted_pdf())
    shell.write("two.pdf", make_encrypted_pdf())
    shell.write("scan.pdf", make_scan())
    shell.write("image.png", b"\x89PNG")
    id = shell.detach()
    shell("resume", id, code=4)
    return id


def test_a_run_shows_its_counts_its_funnel_and_its_failures_by_cause(shell: Shell, run: str) -> None:
    said = shell("show", run)
    assert "COMPLETED_WITH_ERRORS" in said
    assert "4: 1 done, 3 failed" in said
    assert "1: 1 unsupported" in said
    assert "✗ 2 at CONTENT_EXTRACTED, encrypted_document: " in said
    (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["DONE"]]
    assert row[1] == "1"
    assert run in shell("list")
    shell("watch", run, code=4)


def test_documents_are_listed_by_status_step_and_cause(shell: Shell, run: str) -> None:
    assert len(shell.json("items", run)) == 4
    assert len(shell.json("items", run, "--limit", "3")) == 3
    assert [one["name"] for one in shell.json("items", run, "--status", "done")] == ["whales.md"]
    cause = "CONTENT_EXTRACTED:Fatal:encrypted_document"
    assert {one["name"] for one in shell.json("items", run, "--cause", cause)} == {"one.pdf", "two.pdf"}
    assert shell.json("items", run, "--step", "fetched") == []
    assert "no such documents" in shell.errors("items", run, "--step", "fetched")
    said = shell("items", run)
    assert "encrypted_document: the document is encrypted" in said
    assert "there is no run 'run_0'" in shell.refused("items", "run_0")


def test_a_document_shows_its_steps_and_its_history(shell: Shell, run: str) -> None:
    id = shell.item(run, "whales.md")["id"]
    said = shell("item", id)
    for step in ("FETCHED", "CONTENT_EXTRACTED", "CHUNKED", "EMBEDDED", "ENTITY_EXTRACTED", "PERSISTED", "INDEXED"):
        assert sum(step in line and "done" in line for line in said.splitlines()) == 1, step
        assert sum(step in line and "step_completed" in line for line in said.splitlines()) == 1, step
    assert "job.enqueued" in said
    found = shell.json("item", id)
    assert {step["state"] for step in found["steps"]} == {"done"}
    assert found["waiting_on"] == []
    bad = shell("item", shell.item(run, "scan.pdf")["id"])
    assert "cause   CONTENT_EXTRACTED:SchemaInvalid:no_text_layer" in bad
    assert "step_failed" in bad
    assert "there is no item 'item_0'" in shell.refused("item", "item_0")


def test_the_inbox_names_causes_and_the_commands_that_help(shell: Shell, run: str) -> None:
    first, second = shell.json("inbox")
    assert (first["cause"], first["count"]) == ("CONTENT_EXTRACTED:Fatal:encrypted_document", 2)
    assert (second["code"], second["names"]) == ("no_text_layer", ["scan.pdf"])
    said = shell("inbox", "--run", run)
    assert f"act:  batchwright ingest retry | dismiss --cause {first['cause']} --run {run}" in said
    groups = {group["code"]: group for group in shell.run.json("inbox")}
    assert (groups["encrypted_document"]["count"], groups["encrypted_document"]["kind"]) == (2, "fatal")
    assert groups["no_text_layer"]["kind"] == "schema_invalid"
    assert groups["no_text_layer"]["message"].endswith("see: batchwright ingest inbox")
    assert "ingest.item" in shell.run("inbox")[1]


@pytest.mark.thorough
def test_a_group_is_retried_once_its_cause_is_fixed(shell: Shell, run: str) -> None:
    shell.write("one.pdf", make_pdf(["Now it can be read."]))
    shell.write("two.pdf", make_pdf(["And this one too."]))
    cause = "CONTENT_EXTRACTED:Fatal:encrypted_document"
    found = shell.json("retry", "--cause", cause, "--anew")
    assert found == {"retried": 2, "runs": {run: 2}}
    assert shell.json("show", run)["status"] == "RUNNING"
    shell("resume", run, code=4)
    assert shell.json("show", run)["item_count_done"] == 3
    (left,) = shell.json("inbox")
    assert left["code"] == "no_text_layer"
    assert f"batchwright ingest watch {run}" in shell.errors("retry", left["item_ids"][0])
    assert "only a FAILED or CANCELLED one can be retried" in shell.refused("retry", left["item_ids"][0])
    assert shell("retry", "--cause", cause).startswith("nothing to retry")


def test_failed_documents_are_dismissed_one_by_one_by_cause_or_all(shell: Shell, run: str) -> None:
    scan = shell.item(run, "scan.pdf")["id"]
    assert shell("dismiss", scan) == "dismissed 1 document\n"
    assert "none of these documents is FAILED and in the inbox" in shell.refused("dismiss", scan)
    assert shell.json("dismiss", "--run", run) == {"dismissed": 2}
    assert "the inbox is empty" in shell.errors("inbox")
    assert shell("dismiss", "--all").startswith("nothing to dismiss")
    assert shell.run.json("inbox") == []
    assert shell.json("show", run)["item_count_failed"] == 3, "dismissed documents stay FAILED"


@pytest.mark.parametrize("verb", ["retry", "dismiss"])
def test_retry_and_dismiss_must_name_the_failures(shell: Shell, verb: str) -> None:
    assert "select documents in one way" in shell.refused(verb)
    assert "select documents in one way" in shell.refused(verb, "item_1", "--all")


# Check ---------------------------------------------------------------------------------------------------------------


def test_the_check_reports_parsers_steps_models_and_vectors(shell: Shell) -> None:
    findings = {one["name"]: one for one in shell.run.json("check")}
    assert findings["documents"]["level"] == "ok"
    assert findings["document steps"]["text"].startswith("FETCHED, CONTENT_EXTRACTED")
    assert findings["document models"]["text"] == "embeddings by 'hash', entities by 'patterns'"
    assert "pgvector" in findings["vectors"]["text"]
    assert "document roots" not in findings


def test_the_check_names_what_is_wrong_and_the_remedy(shell: Shell) -> None:
    (shell.folder / "batchwright.toml").write_text(
        '[ingest]\nroots = ["/no/such/folder"]\nentities = "gpt-99"\nsteps = ["bad_steps.py"]\n'
    )
    (shell.folder / "bad_steps.py").write_text(
        "from batchwright.ingest.pipeline import step\n\n"
        '@step("ODD", after="NOWHERE")\nasync def odd(ctx):\n    return {}\n'
    )
    code, out, _ = shell.run("check", "--json")
    import orjson

    findings = {one["name"]: one for one in orjson.loads(out)}
    assert code == 1
    assert "names 'NOWHERE', which is not a step" in findings["document steps"]["text"]
    assert findings["document models"]["text"].startswith("there is no model server for 'gpt-99'")
    assert findings["document roots"]["text"] == "/no/such/folder cannot be read here"
    assert findings["document roots"]["remedy"] == "create it, or correct `roots` in [ingest]"
