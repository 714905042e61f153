"""Make the fixture with the version that is installed here: `python tests/upgrade/make.py`, before its successor.

It starts everything in a folder of its own, kills it in the middle of a batch, and keeps what is left: the rows of all
tables in rows.jsonl, and the folders of the store and of the workers in folder.tar.gz.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from batchwright.db.embedded import EmbeddedPostgres
from batchwright.errors import BatchwrightError

HERE = Path(__file__).parent
REQUESTS = 200
MINUTES_MAX = 2
SETTINGS = {
    "BATCHWRIGHT_BATCHES_CHECKPOINT_SECONDS": "1.5",
    "BATCHWRIGHT_INFERENCE_CONCURRENCY": "16",
    "BATCHWRIGHT_INFERENCE_MODEL_CONCURRENCY_START": "8",
    "BATCHWRIGHT_INFERENCE_MODEL_CONCURRENCY_MAX": "8",
    "BATCHWRIGHT_LOG_FORM": "text",
    "HOSTNAME": "before",
}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="batchwright-before-"))
    folder.chmod(0o755)
    started: list[subprocess.Popen[str]] = []
    try:
        made = begin(folder, started)
        kill(started)
        keep(folder, made)
    finally:
        kill(started)
        with contextlib.suppress(BatchwrightError):  # the last user has stopped it already
            EmbeddedPostgres(folder).pg_ctl("stop", "-m", "fast", "-w")
        shutil.rmtree(folder)


def begin(folder: Path, started: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """Create everything in the fixture, up to the moment when the worker dies."""
    environment = {**os.environ, **SETTINGS, "BATCHWRIGHT_DATABASE_FOLDER": str(folder)}
    simulator = start(["simulate", "--decode", "8", "--output-sigma", "0", "--port", "0"], environment, started)
    environment["BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL"] = said(simulator, r"http://\S+:\d+")
    up = start(["up", str(HERE / "jobs.py"), "--port", "0", "--processes", "1"], environment, started)
    url = said(up, r"http://\S+:\d+")
    made = {"key": run(["key", "create", "laptop"], environment)}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {made['key']}"}, timeout=30) as http:
        made |= submit_jobs(http)
        made |= submit_batch(http)
        wait_for_a_tail(folder, made["batch"])
    return made


def submit_jobs(http: httpx.Client) -> dict[str, Any]:
    def submit(job_type: str, **fields: Any) -> str:
        return str(post(http, "/v1/jobs", {"job_type": job_type, **fields})["id"])

    schedule = {"cron": "* * * * *", "job": {"job_type": "note", "payload": {"text": "tick"}}}
    answer = http.put("/v1/schedules/minutely", json=schedule)
    assert answer.is_success, answer.text
    pieces = ["first half, ", "second half"]
    wanted = {"filename": "halves.txt", "purpose": "batch", "mime_type": "text/plain", "bytes": len("".join(pieces))}
    upload = post(http, "/v1/uploads", wanted)["id"]
    part = http.post(f"/v1/uploads/{upload}/parts", files={"data": ("part", pieces[0].encode())}).json()["id"]
    jobs = {
        "done": submit("note", payload={"text": "done"}),
        "failed": submit("spoil"),
        "held": submit("linger"),
        "parent": submit("family"),
        "later": submit("note", payload={"text": "later"}, delay_seconds=60),
        "cancelled": submit("note", delay_seconds=3600),
    }
    post(http, f"/v1/jobs/{jobs['cancelled']}/cancel", {})
    return {"jobs": jobs, "upload": {"id": upload, "part": part, "pieces": pieces}}


def submit_batch(http: httpx.Client) -> dict[str, Any]:
    def request(n: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Say r{n}."}]
        body = {"model": "large" if n % 3 else "small", "messages": messages, "max_tokens": 4}
        return {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = "".join(json.dumps(request(n)) + "\n" for n in range(REQUESTS))
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines.encode())})
    new = {"input_file_id": answer.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return {"batch": post(http, "/v1/batches", new)["id"], "requests": REQUESTS}


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def wait_for_a_tail(folder: Path, batch: str) -> None:
    """Wait until some answers are registered and some others are only in the journals."""
    deadline = time.monotonic() + 60 * MINUTES_MAX
    with psycopg.connect(EmbeddedPostgres(folder).url, autocommit=True) as database:
        while time.monotonic() < deadline:
            sql = "SELECT count(*), coalesce(sum(end_byte - start_byte), 0) FROM batchwright.batch_segment"
            segments, registered = database.execute(sql).fetchone() or (0, 0)
            written = sum(path.stat().st_size for path in (folder / "work" / batch).glob("*.seg"))
            if segments >= 2 and written - registered > 8000:
                return
            time.sleep(0.02)
    raise TimeoutError("no journal had unregistered answers")


def start(command: list[str], environment: dict[str, str], started: list[subprocess.Popen[str]]) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    started.append(process)
    return process


def said(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if found := re.search(pattern, line):
            return found[0]
    raise RuntimeError(text)


def run(command: list[str], environment: dict[str, str]) -> str:
    whole = [sys.executable, "-m", "batchwright", *command]
    return subprocess.run(whole, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def kill(started: list[subprocess.Popen[str]]) -> None:
    """Kill all processes with their workers, which would otherwise still work for a while; the server keeps running."""
    for process in (one for one in started if one.poll() is None):
        below = psutil.Process(process.pid).children(recursive=True)
        for one in [process, *(child for child in below if child.name() != "postgres")]:
            one.kill()
            one.wait()


def keep(folder: Path, made: dict[str, Any]) -> None:
    with EmbeddedPostgres(folder) as server, psycopg.connect(server.url) as database:
        ((now,),) = database.execute("SELECT now()").fetchall()
        lines = [json.dumps({"made_at": now.isoformat(), **made})]
        for table in tables(database):
            rows = database.execute(f"SELECT row_to_json(one)::text FROM batchwright.{table} one").fetchall()
            lines += [json.dumps({"table": table, "row": json.loads(row)}) for (row,) in rows]
    text = "\n".join(lines) + "\n"
    assert str(folder) not in text, "the rows must not name a folder of this machine"
    (HERE / "rows.jsonl").write_text(text, encoding="utf-8")
    with tarfile.open(HERE / "folder.tar.gz", "w:gz") as archive:
        for name in ("files", "work"):
            archive.add(folder / name, name, filter=anonymous)


def tables(database: psycopg.Connection[Any]) -> list[str]:
    """All tables but partitions, which are read through their parent, and those that migrations fill."""
    sql = """SELECT relname FROM pg_class WHERE relnamespace = 'batchwright'::regnamespace AND relkind IN ('r', 'p')
             AND NOT relispartition AND relname <> 'migration' ORDER BY oid"""
    return [name for (name,) in database.execute(sql)]


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
