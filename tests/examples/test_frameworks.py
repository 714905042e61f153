"""The examples for Django, Flask and FastAPI, run as their READMEs say: a web server, a worker, and requests."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_MAX = 60.0
COMMANDS = {
    "django": (["-m", "batchwright", "worker", "shop.jobs"], ["manage.py", "runserver", "--noreload", "{port}"]),
    "fastapi": (["-m", "batchwright", "worker", "jobs.py"], ["-m", "uvicorn", "web:app", "--port", "{port}"]),
    "flask": (["-m", "batchwright", "worker", "jobs.py"], ["-m", "flask", "--app", "web", "run", "--port", "{port}"]),
}
TABLES = {"django": ["manage.py", "migrate"], "fastapi": ["shop.py"], "flask": ["shop.py"]}


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    "name", ["django", pytest.param("fastapi", marks=THOROUGH), pytest.param("flask", marks=THOROUGH)]
)
def test_the_example_stores_an_order_and_its_job_together_or_not_at_all(name, database_url, tmp_path):
    folder, environment = EXAMPLES / name, make_environment(database_url, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    subprocess.run([sys.executable, *TABLES[name]], cwd=folder, env=environment, check=True, timeout=SECONDS_MAX)
    with ExitStack() as stack:
        for number, command in enumerate(COMMANDS[name]):
            arguments = [word.format(port=port) for word in command]
            stack.enter_context(running(arguments, folder, environment, tmp_path / f"{number}.log"))
        orders = f"http://127.0.0.1:{port}/orders"
        until_answering(f"{orders}/1", tmp_path)
        until_published(database_url, tmp_path)

        status, made = call(orders, {"email": "ada@example.com", "total": 12.5})
        assert (status, made["order"]) == (201, 1), made
        assert re.fullmatch(r"ada@example.com paid 12\.50?", receipt_of(orders, 1))
        status, refused = call(orders, {"email": "ada@example.com", "total": 2000})
        assert (status, "more than the card allows" in json.dumps(refused)) == (402, True)
        assert call(f"{orders}/2")[0] == 404, "the order was rolled back"
    with psycopg.connect(database_url) as connection:
        jobs = connection.execute("SELECT id::text, status::text FROM batchwright.job").fetchall()
        assert jobs == [(made["job"], "SUCCEEDED")], "a job was left of an order that was rolled back"


def make_environment(database_url: str, folder: Path) -> dict[str, str]:
    parts = {name: str(value) for name, value in conninfo_to_dict(database_url).items()}
    user = quote(parts.get("user", ""))
    password = f":{quote(parts['password'])}" if "password" in parts else ""
    where = "&".join(f"{name}={quote(parts[name], safe='')}" for name in ("host", "port") if name in parts)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
    return {
        **kept,
        "BATCHWRIGHT_DATABASE_FOLDER": str(folder),
        "BATCHWRIGHT_DATABASE_URL": f"postgresql://{user}{password}@/{parts['dbname']}?{where}",
        "PYTHONPATH": ".",
    }


@contextmanager
def running(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def call(url: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object]]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS_MAX) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {"text": text}


def receipt_of(orders: str, id: int) -> str:
    deadline = time.monotonic() + SECONDS_MAX
    while not (receipt := call(f"{orders}/{id}")[1]["receipt"]):
        assert time.monotonic() < deadline, "no receipt was written"
        time.sleep(0.02)
    return str(receipt)


def until_answering(url: str, folder: Path) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            assert call(url)[0] == 404
        except urllib.error.URLError:
            assert time.monotonic() < deadline, read_logs(folder)
            time.sleep(0.05)
        else:
            return


def until_published(database_url: str, folder: Path) -> None:
    """The web application enqueues by name, so a worker must have published the operation."""
    deadline = time.monotonic() + SECONDS_MAX
    with psycopg.connect(database_url, autocommit=True) as connection:
        while not connection.execute("SELECT 1 FROM batchwright.operation WHERE name = 'write_receipt'").fetchone():
            assert time.monotonic() < deadline, read_logs(folder)
            time.sleep(0.05)


def read_logs(folder: Path) -> str:
    return "\n".join(log.read_text() for log in folder.glob("*.log"))
