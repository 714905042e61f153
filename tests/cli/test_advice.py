"""The advice in messages can be followed and helps."""

from __future__ import annotations

import os
import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchwright.cli.commands.banner import _work_text
from batchwright.cli.commands.check import _judge_due_types
from batchwright.cli.commands.serve import _describe_listener
from batchwright.cli.listeners import Listener, find_listener
from batchwright.engine.views import OperationView
from batchwright.engine.work import is_own, name_of_work, why_no_worker
from batchwright.errors import ConfigurationError
from batchwright.operations.registry import Registry
from batchwright.plugins import load, part_kinds
from batchwright.settings import load_settings, use_model_server
from tests.cli.conftest import SAMPLE, SECONDS_MAX, Cli, Inside

HERE = "http://127.0.0.1:9"


def test_a_second_up_names_the_first_and_where_it_answers(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with cli.start("up", "--no-worker", "--port", str(port), "--url", HERE) as up:
        _wait_until_listening(port)
        said = cli("up", "--port", str(port), code=1).stderr
        assert f"error: Batchwright is already running at http://127.0.0.1:{port}, pid {up.pid}; use that one" in said


def _wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"no process listens on {port} after {SECONDS_MAX:g} s"
            time.sleep(0.02)
        else:
            return


def test_if_the_port_is_in_use_the_other_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_listener(port)
    if not Path("/proc/net/tcp").exists():
        assert found is None
        return
    assert found is not None
    assert (found.pid, found.is_batchwright) == (os.getpid(), False)
    assert find_listener(port) is None
    said = _describe_listener(Listener(7, ("/usr/sbin/nginx", "-g")), "127.0.0.1", 8765)
    assert said == "port 8765 is in use by nginx, pid 7; choose another one with --port"


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (("/usr/bin/python3", "/home/me/.venv/bin/batchwright", "up"), True),
        (("python", "-m", "batchwright", "up"), True),
        (("python", "-P", "-m", "batchwright", "api"), True),
        (("vim", "batchwright.toml"), False),
        ((), False),
    ],
)
def test_another_batchwright_is_recognized_by_its_command_line(words: tuple[str, ...], is_ours: bool) -> None:
    assert Listener(7, words).is_batchwright == is_ours


def test_the_url_of_up_replaces_the_servers_of_the_settings_and_no_key_goes_to_another_server() -> None:
    named = load_settings({"model_gateways": {"m": {"url": "http://a:1", "api_key_env": "KEY"}}}, environment={})
    used = use_model_server(named, HERE)
    assert (used.global_inference_gateway.url, used.model_gateways, used.has_gateways) == (HERE, {}, True)
    before = {"url": "http://a:1/v1", "api_key_env": "KEY", "request_timeout": "7s"}
    one = load_settings({"global_inference_gateway": before}, environment={})
    other = use_model_server(one, HERE).global_inference_gateway
    assert (other.api_key_env, other.request_timeout) == (None, 7.0)
    assert use_model_server(one, "http://a:1").global_inference_gateway.api_key_env == "KEY"


def test_a_file_without_operations_says_so(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("def hello() -> None: ...\n")
    said = "empty.py has no operations; mark a function with @operation, or leave empty.py out"
    code, _, err = inside("worker", "empty.py")
    assert (code, err) == (
        1,
        f"error: {said}\n",
    )
    with pytest.raises(ConfigurationError, match="has no operations"):
        Registry.load([SAMPLE, str(tmp_path / "empty.py")], entry_points=False)


def test_messages_name_batches_and_not_their_internal_jobs() -> None:
    """Every operation of a part has a name for users, or is one that users submit."""
    operations = [load(place) for kind in part_kinds() for place in kind.operations]
    names = [function.__batchwright_operation__.name for function in operations if _is_ours(function)]
    assert {name for name in names if is_own(name)} == set()
    assert name_of_work("batch.process") == "batches"
    assert name_of_work("batch.mine") is None
    said = why_no_worker("batch.shard", "shard/llama")
    assert said.startswith("no live worker runs batches; ")
    assert "global_inference_gateway.url" in said
    assert why_no_worker("mine", "q") == "no live worker knows the operation 'mine' and serves the queue 'q'"


def _is_ours(function: object) -> bool:
    return getattr(function, "__module__", "").startswith("batchwright.")


def test_jobs_that_no_worker_runs_have_one_remedy() -> None:
    due = _judge_due_types({"batch.process": 2, "batch.shard": 5})
    assert due.text == "no live worker runs batches"
    assert due.remedy is not None
    assert due.remedy.startswith("start one: batchwright up, or batchwright worker; for batches it needs a model")
    both = _judge_due_types({"provider.task": 1, "mine": 3})
    assert both.text == "no live worker runs tasks; no live worker knows mine (3)"
    assert both.remedy == "start one with these operations: batchwright up, or batchwright worker"


def test_the_banner_of_up_has_no_internal_names_and_says_what_batches_need() -> None:
    names = ("compute_embeddings", "hello", "ingest.run", "provider.task")
    values = {
        "description": None,
        "payload_schema": {},
        "defaults": {},
        "published_at": datetime.now(UTC),
        "workers": 1,
    }
    operations = [OperationView(name=name, **values) for name in names]
    assert _work_text(operations).startswith("documents, tasks · no batches: they need a model server, --url http")
    assert _work_text([*operations, OperationView(name="batch.process", **values)]) == "batches, documents, tasks"


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("BATCHWRIGHT_MODEL_GATEWAYS", "{bad", "the environment variable BATCHWRIGHT_MODEL_GATEWAYS is not JSON: "),
        (
            "BATCHWRIGHT_MODEL_GATEWAYS",
            "'{}'",
            "the environment variable BATCHWRIGHT_MODEL_GATEWAYS is not JSON; ",
        ),
        ("BATCHWRIGHT_PROVIDERS", "sk-secret", "the environment variable BATCHWRIGHT_PROVIDERS is not JSON; write"),
        (
            "BATCHWRIGHT_WORKER_CONCURRENCY",
            "many",
            "the environment variable BATCHWRIGHT_WORKER_CONCURRENCY) is ",
        ),
    ],
)
def test_a_bad_value_of_the_environment_names_its_variable(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as refused:
        load_settings(environment={variable: text})
    assert "sk-secret" not in str(refused.value), "the message must not repeat the value, which may contain keys"
