"""`batchwright ingest run` and `resume`: alone, beside a worker, interrupted, and parked."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable

import psycopg
import pytest

from tests.ingest.commands.conftest import Shell
from tests.ingest.documents import make_encrypted_pdf, make_pdf

WHALES = "# Whales\n\nWhales are mammals that live in the sea.\n"


def many(shell: Shell, count: int) -> None:
    for number in range(count):
        shell.write(f"{number:03}.txt", f"Document number {number} speaks of rivers and of harbours.")


# Alone ---------------------------------------------------------------------------------------------------------------


def test_one_command_on_a_database_without_workers_does_everything(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    shell.write("ships.pdf", make_pdf(["The first page is about ships.", "The second page is about harbours."]))
    said = shell("run", "papers", "--collection", "papers")
    assert "COMPLETED" in said
    assert "2: 2 done" in said
    assert said.splitlines()[-1].endswith('batchwright ingest search papers "…"')
    assert "**harbours**" in shell("search", "papers", "harbours")
    assert shell.run.json("workers") == [], "the worker of the command has stopped"


def test_failed_documents_set_the_exit_code_and_are_in_the_inbox(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    shell.write("secret.pdf", make_encrypted_pdf())
    said = shell("run", "papers", "-c", "papers", code=4)
    assert "✗" not in said, "symbols are printed only on terminals"
    assert "1 at CONTENT_EXTRACTED, encrypted_document: secret.pdf: the document is encrypted" in said
    assert "batchwright ingest inbox --run run_" in said


@pytest.mark.thorough
def test_a_second_run_does_nothing_for_unchanged_files_and_retires_a_removed_file(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    gone = shell.write("trees.txt", "Trees grow slowly in the north.")
    shell("run", "papers", "-c", "papers")
    assert "2: 2 unchanged" in shell("run", "papers", "-c", "papers")
    assert "2: 2 done" in shell("run", "papers", "-c", "papers", "--force")
    gone.unlink()
    shell("run", "papers", "-c", "papers")
    assert [one["name"] for one in shell.json("documents", "papers")] == ["whales.md"]


def test_with_json_a_run_prints_an_object_for_each_change(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    lines = shell("run", "papers", "-c", "papers", "--metadata", "project=sea", "--json").splitlines()
    seen = [json.loads(line) for line in lines]
    assert len(set(lines)) == len(lines)
    last = seen[-1]
    assert (last["status"], last["item_count_done"], last["metadata"]) == ("COMPLETED", 1, {"project": "sea"})
    assert [stage["reached"] for stage in last["funnel"]] == [1] * 7
    assert last == shell.json("show", last["id"])


def test_sources_that_are_not_there_are_refused_before_anything_is_created(shell: Shell) -> None:
    assert "there is no file or folder" in shell.refused("run", "nowhere", "-c", "papers")
    assert "there is no source" in shell.refused("run", "-c", "papers")
    assert "is not a source: the scheme ftp: is not supported" in shell.refused(
        "run", "ftp://example.com/a", "-c", "papers"
    )
    assert "--budget 'much' is not an amount" in shell.refused("run", "papers", "-c", "papers", "--budget", "much")
    assert "--deadline '5y' is not a duration: write 90s, 5m, 1h or 2d" in shell.refused(
        "run", "papers", "-c", "papers", "--deadline", "5y"
    )
    assert "is not a collection name" in shell.refused("run", "papers", "-c", "a/b")
    assert shell.json("list") == []


def test_names_are_chosen_by_patterns_and_a_run_without_a_worker_says_so(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    shell.write("drafts/trees.md", "# Trees")
    shell.write("notes.txt", "Notes")
    flags = ("--include", "*.md", "--exclude", "drafts/", "--detach")
    assert "no live worker runs documents" in shell.errors("run", "papers", "-c", "papers", *flags)
    (run,) = shell.json("list")
    assert run["status"] == "PENDING"
    shell("resume", run["id"])
    assert [one["name"] for one in shell.json("items", run["id"])] == ["whales.md"]


# Interrupted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGKILL])
def test_an_interrupted_run_is_resumed_by_the_same_command(shell: Shell, number: signal.Signals) -> None:
    many(shell, 120)
    shell.cli.environment["BATCHWRIGHT_WORKER_CONCURRENCY"] = "1"
    with shell.cli.start("ingest", "run", "papers", "-c", "papers") as running:
        running.until("the same command resumes")
        shell.cli.until("SELECT FROM batchwright.ingest_item WHERE status = 'DONE'")
        running.signal(number)
        assert running.ended() == (130 if number is signal.SIGINT else -number)
        if number is signal.SIGINT:
            running.until(r"stopped at \d+ of 120 documents; they are kept")
            running.until(r"batchwright ingest resume run_\w+")
            assert shell.run.json("workers") == []
    (run,) = shell.json("list")
    assert run["status"] == "RUNNING"
    assert 0 < run["item_count_open"] < 120
    said = shell.errors("run", "papers", "-c", "papers")
    assert "resuming the open run of the same sources" in said
    (ended,) = shell.json("list")
    assert (ended["id"], ended["status"], ended["item_count_done"]) == (run["id"], "COMPLETED", 120)
    ((twice,),) = shell.cli.rows(
        "SELECT count(*) FROM (SELECT job_id, fields ->> 'step' FROM batchwright.job_event"
        " WHERE event = 'step_completed' GROUP BY 1, 2 HAVING count(*) > 1) AS twice"
    )
    assert twice == 0


def test_an_open_run_with_other_settings_is_not_resumed(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    run = shell.detach()
    said = shell.refused("run", "papers", "-c", "papers", "--chunk-characters", "700")
    assert f"{run} of the same sources is open with other settings (chunk)" in said
    assert f"batchwright ingest cancel {run}" in said
    other = shell("run", "papers", "-c", "others", "--detach").strip()
    assert other != run
    assert shell.detach() == run, "the same sources into the same collection are the same run"


@pytest.mark.thorough
def test_beside_a_worker_the_command_only_watches(shell: Shell) -> None:
    many(shell, 5)
    with shell.cli.start("worker"):
        shell.cli.until("SELECT FROM batchwright.worker WHERE 'ingest.item' = ANY(operations)")
        shell("run", "papers", "-c", "papers")
        workers = shell.cli.rows("SELECT DISTINCT worker FROM batchwright.job_event WHERE event = 'step_completed'")
        assert [(one["id"],) for one in shell.run.json("workers")] == workers


@pytest.mark.thorough
def test_a_command_that_watches_takes_over_when_the_last_worker_leaves(shell: Shell) -> None:
    many(shell, 60)
    shell.cli.environment["BATCHWRIGHT_WORKER_CONCURRENCY"] = "1"
    with shell.cli.start("worker") as worker:
        shell.cli.until("SELECT FROM batchwright.worker WHERE 'ingest.item' = ANY(operations)")
        with shell.cli.start("ingest", "run", "papers", "-c", "papers") as running:
            shell.cli.until("SELECT FROM batchwright.ingest_item WHERE status = 'DONE'")
            worker.signal(signal.SIGTERM)
            worker.ended()
            assert running.ended() == 0
    ((workers,),) = shell.cli.rows(
        "SELECT count(DISTINCT worker) FROM batchwright.job_event WHERE event = 'step_completed'"
    )
    assert workers == 2


# Parked and cancelled ------------------------------------------------------------------------------------------------


def test_a_parked_run_is_resumed_and_a_cancelled_one_is_not(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    run = shell.detach()
    assert f"resume it: batchwright ingest resume {run}" in shell("park", run)
    assert "only a PENDING or RUNNING one can be parked" in shell.refused("park", run)
    assert shell.json("show", run)["waiting_on"][0]["reason"] == "user"
    assert "the run is parked: parked by a user; resume it" in " ".join(shell("show", run).split())
    assert "COMPLETED" in shell("resume", run)
    assert f"batchwright ingest retry --run {run}" in shell.refused("resume", run)
    other = shell.detach("--force")
    assert shell("cancel", other) == f"{other} is CANCELLED\n"
    shell("watch", other, code=3)
    assert "cannot be cancelled" in shell.refused("cancel", other)
    assert [one["status"] for one in shell.json("list", "--status", "cancelled")] == ["CANCELLED"]


@pytest.mark.usefixtures("provider")
def test_a_run_whose_budget_is_used_up_is_parked_and_resumed_with_a_larger_one(shell: Shell) -> None:
    many(shell, 3)
    flags = ("--embedding-model", "embedder", "--lane", "realtime", "--budget", "0.000001")
    said = shell.errors("run", "papers", "-c", "papers", *flags, code=1)
    assert re.search(r"is parked: 0 of the budget of 0\.000001 are spent .* may cost 0\.0000\d+", said), said
    (run,) = shell.json("list")
    assert f"raise the budget: batchwright ingest resume {run['id']} --budget AMOUNT" in said
    (group,) = shell.run.json("inbox")
    assert (group["job_type"], group["code"], group["count"]) == ("ingest.run", "parked_budget", 1)
    assert run["id"] in group["message"]
    shell("resume", run["id"], "--budget", "5.00")
    ended = shell.json("show", run["id"])
    assert (ended["status"], ended["budget"], ended["calls"]) == ("COMPLETED", 5.0, 3)
    assert 0 < ended["spent"] < 0.01
    assert "of 5.00" in shell("show", run["id"])


def test_a_run_that_failed_as_a_whole_can_be_started_again(shell: Shell) -> None:
    shell.write("whales.md", WHALES)
    run = shell.detach()
    (shell.folder / "papers").rename(shell.folder / "elsewhere")
    assert "FAILED" in shell("resume", run, code=1)
    (shell.folder / "elsewhere").rename(shell.folder / "papers")
    shell("resume", run)
    assert shell.json("show", run)["status"] == "COMPLETED"


# The estimate --------------------------------------------------------------------------------------------------------


def test_an_estimate_without_a_model_shows_documents_pages_and_tokens(shell: Shell) -> None:
    for number in range(12):
        shell.write(f"{number}.pdf", make_pdf(["Ships and harbours. " * 20] * 3))
    shell.write("secret.pdf", make_encrypted_pdf())
    found = shell.json("estimate", "papers", "-c", "papers")
    assert (found["documents"], found["sampled"]) == (13, 8)
    assert 30 <= found["pages"]["value"] <= 42, "12 of 13 documents have 3 pages"
    assert found["cost"] == {"realtime": {"low": 0.0, "value": 0.0, "high": 0.0}, "batch": found["cost"]["realtime"]}
    assert "nothing: no model of a server is used" in shell("estimate", "papers", "-c", "papers")
    assert shell.json("list") == []


@pytest.mark.thorough
def test_an_estimate_knows_prices_limits_and_what_is_unchanged(shell: Shell, provider: Callable[..., None]) -> None:
    many(shell, 4)
    flags = ("papers", "-c", "papers", "--embedding-model", "embedder")
    said = shell("estimate", *flags)
    assert "time: no requests_per_minute or tokens_per_minute is set" in said
    provider("requests_per_minute = 60")
    assert "4 for embedding" in shell("estimate", *flags)
    found = shell.json("estimate", *flags)
    assert found["cost"]["realtime"]["value"] > 0
    assert found["seconds"]["value"] == pytest.approx(4.0)
    assert found["models"] == {"embedding": "embedder"}
    assert "there is no terminal to confirm the estimate on" in shell.refused("run", *flags, "--estimate")
    said = shell("run", *flags, "--estimate", "--yes", "--lane", "realtime")
    assert "cost in realtime" in said
    (run,) = shell.json("list")
    assert run["estimate"]["documents"] == 4
    assert "estimate" in shell("show", run["id"])
    assert shell.json("estimate", *flags)["unchanged"] == 4
    assert shell.json("estimate", *flags, "--force")["unchanged"] == 0


def test_an_estimate_says_which_price_is_missing(shell: Shell, provider: Callable[..., None]) -> None:
    many(shell, 2)
    found = shell.json("estimate", "papers", "-c", "papers", "--embedding-model", "unheard-of")
    assert found["cost"]["realtime"] is None
    assert any("the price of 'unheard-of' is unknown" in one for one in found["unknown"])
    assert "unknown" in shell("estimate", "papers", "-c", "papers", "--embedding-model", "unheard-of")


def test_costs_are_listed_by_tenant_and_model(shell: Shell, database_url: str) -> None:
    assert shell.errors("costs").startswith("no model server was called in the last 30 days")
    assert shell.json("costs")["parts"] == []
    add = (
        "INSERT INTO batchwright.spending (tenant, day, model, lane, calls, unpriced, prompt_tokens, cost) "
        "SELECT tenant, (now() AT TIME ZONE 'UTC')::date, model, 'realtime', 2000, unpriced, 12345, cost FROM (VALUES "
        "('acme', 'small', 0, 0.5), ('acme', 'new', 2000, 0), ('other', 'mixed', 3, 0.25)) "
        "AS given (tenant, model, unpriced, cost)"
    )
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(add)
    lines = [" ".join(line.split()) for line in shell("costs").splitlines()]
    assert lines[1:] == [
        "acme realtime 2,000 12,345 0 $0.5 small",
        "other realtime 2,000 12,345 0 $0.25 and 3 calls without a price mixed",
        "acme realtime 2,000 12,345 0 unknown new",
        "total 6,000 37,035 0 $0.75 and 2,003 calls without a price",
    ]
    assert "other" not in shell("costs", "--tenant", "acme")
    assert shell.json("costs", "--limit", "1")["has_more"] is True
