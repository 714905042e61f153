"""`batchwright check`: what is wrong is named, with the remedy."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import psycopg
import pytest

from batchwright.db import check
from batchwright.db.check import Finding, Level, check_database, describe
from batchwright.db.database import Pool
from batchwright.engine.queue import Queue
from batchwright.engine.workers import Workers
from tests.cli.conftest import SAMPLE, Cli, Inside
from tests.conftest import roomy_folder
from tests.storage.conftest import S3, s3, s3_port
from tests.support import DATABASE

__all__ = ["s3", "s3_port"]


async def find(pool: Pool, name: str, **options) -> Finding:
    (found,) = [one for one in await check_database(pool, DATABASE, **options) if one.name == name]
    return found


def test_a_database_without_schema_is_an_error_with_its_remedy(empty_cli: Cli) -> None:
    said = empty_cli("check", SAMPLE, code=1).stdout
    assert re.search(r"✓ operations +sample.block, sample.fail", said)
    assert "✗ schema" in said
    assert "→ run: batchwright migrate" in said


def test_a_good_database_without_workers_has_warnings_only(inside: Inside, publish: None) -> None:
    inside("job", "submit", "sample.greet")
    found = {one["name"]: one for one in inside.json("check")}
    assert {name for name, one in found.items() if one["level"] == "error"} == set()
    remedy = "start one with these operations: batchwright up, or batchwright worker"
    assert found["workers"]["remedy"] == remedy
    assert found["due jobs"]["text"] == "no live worker knows sample.greet (1)"
    assert found["due jobs"]["remedy"] is None, "one remedy, once"
    assert found["operations"]["level"] == "warning"
    assert found["server"]["level"] == found["session"]["level"] == found["schema"]["level"] == "ok"


def test_wrong_settings_and_sources_are_findings(inside: Inside, tmp_path) -> None:
    (tmp_path / "batchwright.toml").write_text("[worker]\nconcurency = 3\n")
    code, out, _ = inside("check")
    assert code == 1
    assert "there is no setting worker.concurency; did you mean worker.concurrency?" in out
    (tmp_path / "batchwright.toml").write_text('operations = ["nowhere"]\n')
    code, out, _ = inside("check")
    assert code == 1
    assert "✗ operations" in out


def test_a_database_that_cannot_be_reached_is_a_finding(inside: Inside) -> None:
    code, out, _ = inside("check", "--database-url", "postgresql://me:secret@127.0.0.1:1/shop")
    assert code == 1
    assert "✗ database" in out
    assert "postgresql://me@127.0.0.1:1/shop" in out
    assert "start the server, or correct host and port" in out
    assert "secret" not in out


@pytest.mark.parametrize(
    ("settings", "level", "words"),
    [
        ({"GLOBAL_INFERENCE_GATEWAY_API_KEY_ENV": "NOWHERE"}, "error", "the environment variable NOWHERE"),
        ({"GLOBAL_INFERENCE_GATEWAY_TLS_CA_CERT_FILE": "nowhere.pem"}, "error", "nowhere.pem"),
        (
            {"WEBHOOKS": '{"a": [{"url": "http://b", "secret_env": "NOWHERE"}]}'},
            "error",
            "the secret of the webhook b-",
        ),
        ({"GLOBAL_INFERENCE_GATEWAY_URL": "http://127.0.0.1:9"}, "warning", "http://127.0.0.1:9 cannot be reached"),
        ({}, "ok", "can be reached"),
    ],
)
def test_what_keeps_a_worker_from_running_batches_is_a_finding(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], level: str, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, value in {"GLOBAL_INFERENCE_GATEWAY_URL": url, **settings}.items():
            monkeypatch.setenv(f"BATCHWRIGHT_{name}", value)
        (found,) = [one for one in orjson.loads(inside("check", "--json")[1]) if one["name"] == "gateways"]
    assert found["level"] == level
    assert words in found["text"]


async def test_a_store_that_the_machines_of_workers_do_not_share_is_a_warning(
    inside: Inside, queue: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_FOLDER", str(tmp_path))
    monkeypatch.setenv("HOSTNAME", "here")

    async def found() -> tuple[str, str]:
        (one,) = [one for one in await asyncio.to_thread(inside.json, "check") if one["name"] == "store"]
        return one["level"], one["text"]

    about: dict[str, Any] = {"pid": 1, "version": "0", "queues": None, "concurrency": 1}
    await Workers(queue.database).register(id="a", host="here", operations=["batch.process"], **about)
    await Workers(queue.database).register(id="b", host="elsewhere", operations=["greet"], **about)
    folder = f"{tmp_path.resolve()}/files"
    assert await found() == ("ok", f"{folder} stores, lists, reads and deletes objects")
    await Workers(queue.database).register(id="c", host="there", operations=["batch.process"], **about)
    assert await found() == ("warning", f"{folder} is a folder of this machine, and batches run on here, there")
    monkeypatch.setenv("BATCHWRIGHT_STORAGE_URL", f"file://{tmp_path}/shared")
    assert await found() == ("ok", f"{tmp_path.resolve()}/shared stores, lists, reads and deletes objects")


@pytest.mark.parametrize("fault", ["whole", 503])
def test_a_store_that_cannot_do_what_batches_need_is_an_error(cli: Cli, s3: S3, fault: int | str) -> None:
    """A batch would wait for one that serves no ranges, or is down, until the end of its window."""
    settings = {
        "BATCHWRIGHT_STORAGE_URL": f"s3://{s3.bucket}",
        "BATCHWRIGHT_STORAGE_RETRY_SECONDS_MAX": "0",
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL": "http://127.0.0.1:9",
    }
    cli.environment |= {**settings, **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")}}
    s3.fail("", "", *[fault] * 20)
    (found,) = [one for one in cli.json("check", code=1) if one["name"] == "store"]
    assert (found["level"], s3.bucket in found["text"]) == ("error", True)
    assert ("range" if fault == "whole" else "503") in found["text"]


def test_headers_that_nobody_could_store_are_a_finding(inside: Inside, tmp_path: Path) -> None:
    gateway = '[global_inference_gateway]\nurl = "http://127.0.0.1:9"\npassthrough_headers = ["x-tenant-id"]\n'
    (tmp_path / "batchwright.toml").write_text(gateway)
    (found,) = [one for one in orjson.loads(inside("check", "--json")[1]) if one["name"] == "gateways"]
    assert found["level"] == "error"
    assert "there is no key for that" in found["text"]
    assert found["remedy"].startswith("set batches.header_key_file")


def test_without_gateways_nothing_is_said_of_them(inside: Inside) -> None:
    assert "gateways" not in {one["name"] for one in inside.json("check")}


async def test_an_old_transaction_is_named_with_its_end(pool: Pool, database_url: str) -> None:
    with psycopg.connect(database_url) as old:
        old.execute("SELECT pg_current_xact_id()")
        found = await find(pool, "vacuum", old_seconds=0.0)
    assert found.level is Level.WARNING
    assert found.text.startswith("the oldest xmin is held by pid ")
    assert found.remedy is not None
    assert "pg_terminate_backend(" in found.remedy


async def test_more_processes_than_connections_are_a_warning(pool: Pool) -> None:
    assert (await find(pool, "connections")).level is Level.OK
    found = await find(pool, "connections", processes=10_000)
    assert found.level is Level.WARNING
    assert found.remedy is not None
    assert found.remedy.startswith("raise max_connections by ")


@pytest.mark.parametrize(("hours", "words"), [(1, "3600 s ahead of"), (-1, "3600 s behind")])
async def test_a_wrong_clock_is_a_warning(pool: Pool, monkeypatch, hours: int, words: str) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(UTC) + timedelta(hours=hours)

    monkeypatch.setattr(check, "datetime", Wrong)
    found = await find(pool, "clock")
    assert found.level is Level.WARNING
    assert words in found.text


def test_an_old_server_is_an_error() -> None:
    assert check._server(140009, "14.9", is_standby=False).level is Level.ERROR
    assert check._server(150000, "15.0", is_standby=False).level is Level.OK


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db:6000/shop", "postgresql://me@db:6000/shop"),
        ("host=db user=me password=secret dbname=shop", "postgresql://me@db/shop"),
        ("postgresql://u:secret@db1,db2/app?target_session_attrs=read-write", "postgresql://u@db1,db2/app"),
        ("postgresql://u:secret@db1:1,db2:2/app", "postgresql://u@db1:1,db2:2/app"),
        ("host=db1,db2 port=6000 user=u dbname=app", "postgresql://u@db1:6000,db2:6000/app"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert describe(url) == shown


def test_folders_that_other_users_can_look_into_are_warnings(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL", "http://127.0.0.1:9")
    base = Path(tempfile.mkdtemp(dir=roomy_folder()))
    folders = {"data": "DATABASE_FOLDER", "our files": "STORAGE_URL", "work": "BATCHES_WORK_DIR"}
    try:
        for name, setting in folders.items():
            (base / name).mkdir()
            (base / name).chmod(0o755)
            url = f"file://{quote(str(base / name))}"
            monkeypatch.setenv(f"BATCHWRIGHT_{setting}", url if name == "our files" else str(base / name))
        assert [one for one in inside.json("check") if one["name"] == "folder"] == [], "nobody comes through its parent"
        base.chmod(0o755)
        found = [one for one in inside.json("check") if one["name"] == "folder"]
        assert [one["level"] for one in found] == ["warning"] * 3
        assert f"other users can look into {base}/data (database.folder, mode 0755)" in found[0]["text"]
        assert found[1]["remedy"] == f"run: chmod 700 '{base}/our files'"
        assert f"{base}/work (batches.work_dir" in found[2]["text"]
        assert {path.stat().st_mode & 0o777 for path in base.iterdir()} == {0o755}, "a check changes nothing"
        for one in found:
            subprocess.run(["sh", "-c", one["remedy"].removeprefix("run: ")], check=True)
        assert [one for one in inside.json("check") if one["name"] == "folder"] == []
    finally:
        shutil.rmtree(base)
