"""docs/providers.md is correct: its tables agree with the adapters, and its example of a provider in one file works."""

import json
import re
import tomllib
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from batchwright.providers.check import check_providers
from batchwright.providers.directory import Directory
from batchwright.providers.prices import find_price
from batchwright.providers.registry import find_adapters, read_settings
from batchwright.providers.settings import TaskSettings
from batchwright.settings import load_settings
from batchwright.states import TaskStatus
from tests.providers.task_stage import SECRET, task_stage

PAGE = (Path(__file__).parents[2] / "docs" / "providers.md").read_text(encoding="utf-8")
FILE = re.search(r"<!-- example: acme.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1]
SETTINGS = tomllib.loads(re.search(r"<!-- settings: acme -->\n```toml\n(.*?)```", PAGE, re.DOTALL)[1])
GENERATED = PAGE.partition("<!-- generated: providers -->")[2].partition("<!-- end -->")[0]


def test_every_provider_and_every_setting_is_documented():
    for name, kind in find_adapters().items():
        assert GENERATED.count(f"| `{name}` |") == 4
        section = GENERATED.partition(f"### [providers.{name}]\n")[2].partition("###")[0]
        for setting in kind.Settings.__dataclass_fields__:
            (meaning,) = re.findall(rf"^\| `{setting}` \| [^|]+ \| (.*) \|$", section, re.MULTILINE)
            assert meaning, f"{name}.{setting} has no meaning"


def test_the_settings_as_printed_are_accepted():
    first = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    settings = load_settings(first, environment={})
    directory = Directory(settings.table("providers", dict), settings.table("tasks", TaskSettings))
    for name in ("openai", "warehouse"):
        assert directory.kind(name) is find_adapters()["openai"]
        assert read_settings(directory.kind(name), directory.settings(name).adapter)
    assert find_price(directory.settings("openai").prices, "openai", "my-model").output == 0.4


class Acme:
    """The service: jobs by name, which end when the test says so."""

    def __init__(self):
        self.jobs = {}
        self.asked = Counter()
        self.is_finished = False
        self.lost_answers = 0

    def answer(self, method, path, key, body):
        if key != f"Bearer {SECRET}":
            return 401, {"error": {"code": "unauthorized", "message": "this key is unknown"}}
        parts = path.strip("/").split("/")
        self.asked[f"{method} {parts[1]}"] += 1
        if parts[1] == "account":
            return 200, {"balance": 7}
        name = parts[2]
        if method == "POST":
            self.jobs.setdefault(name, [json.loads(line) for line in body.splitlines()])
            self.lost_answers -= 1
            return (None if self.lost_answers >= 0 else 200), self.shown(name)
        if name not in self.jobs:
            return 404, {"error": {"code": "no_job", "message": "there is no job of this name"}}
        return 200, self.results(name) if len(parts) > 3 else self.shown(name)

    def shown(self, name):
        bad = sum("[[fail" in json.dumps(line) for line in self.jobs[name])
        total = len(self.jobs[name])
        counts = {"good": total - bad, "bad": bad} if self.is_finished else {"good": 0, "bad": 0}
        return {"state": "finished" if self.is_finished else "running", "total": total, **counts}

    def results(self, name):
        lines = []
        for line in self.jobs[name]:
            content = line["chat"]["messages"][0]["content"]
            if "[[fail" in content:
                lines.append({"id": line["id"], "error": {"code": "bad_request", "message": "no"}})
                continue
            usage = {"prompt_tokens": 1000, "completion_tokens": 2000}
            choices = [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]
            answer = {"model": line["chat"]["model"], "choices": choices, "usage": usage}
            lines.append({"id": line["id"], "answer": answer})
        return lines


@contextmanager
def serving(acme):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, said = acme.answer(self.command, self.path, self.headers.get("authorization"), body)
            if status is None:
                self.close_connection = True
                return
            lines = said if isinstance(said, list) else [said]
            data = b"\n".join(json.dumps(line).encode() for line in lines)
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
async def stage(database_url, tmp_path):
    """Batchwright with the folder and the table that the page prints, and the address of the service."""
    (tmp_path / "providers").mkdir()
    (tmp_path / "providers" / "acme.py").write_text(FILE)
    (folder,) = SETTINGS["tasks"]["adapters"]
    acme = Acme()
    with serving(acme) as url:
        tables = {"acme": {**SETTINGS["providers"]["acme"], "base_url": url, "settle_seconds": 0.1}}
        adapters = {"adapters": (str(tmp_path / folder),)}
        async with task_stage(database_url, tmp_path, tables=tables, tasks=adapters) as stage:
            stage.environment["ACME_API_KEY"] = SECRET
            yield stage, acme


async def test_a_provider_of_one_file_runs_a_whole_task(stage):
    stage, acme = stage
    stage.work()
    id = await stage.complete(["acme/fast-1"], "hello", "fail", "goodbye")
    (job,) = await stage.submitted(id)
    assert job.external_id == job.key
    acme.is_finished = True
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.PARTIAL_COMPLETE
    assert (task.succeeded, task.failed) == (2, 1)
    lines = {line["custom_id"]: line for line in await stage.result(task)}
    assert lines["line-2"]["response"]["body"]["choices"][0]["message"]["content"] == "Say goodbye."
    assert lines["line-1"]["error"]["code"] == "bad_request"
    assert {line["model"] for line in lines.values()} == {"fast-1"}
    assert (task.input_tokens, task.output_tokens) == (2000, 4000)
    assert task.cost == pytest.approx(2000 * 0.5e-6 + 4000 * 1.5e-6)
    assert (len(acme.jobs), acme.asked["POST jobs"]) == (1, 1)


async def test_a_provider_of_one_file_pays_once_for_an_answer_that_was_lost(stage):
    stage, acme = stage
    acme.lost_answers = 1
    stage.work()
    id = await stage.complete(["acme/fast-1"], "hello")
    await stage.submitted(id)
    acme.is_finished = True
    task = await stage.until(id, lambda task: task.has_ended)
    assert task.status is TaskStatus.COMPLETED
    assert (len(acme.jobs), acme.asked["POST jobs"]) == (1, 1)


async def test_a_provider_of_one_file_is_checked_like_ours(stage):
    stage, _ = stage
    found = {one.name: one for one in await check_providers(stage.part)}
    assert "accepts the key" in found["provider acme"].text
    stage.environment["ACME_API_KEY"] = "another"
    del stage.part.directory._made["acme"]
    found = {one.name: one for one in await check_providers(stage.part)}
    assert "this key is unknown" in found["provider acme"].text
