"""A batch that one process runs by itself: its settings, its queue, and its lock."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import Any

import pytest

from batchwright.batches.local import LocalRun, lock_queue, private_settings, use_server
from batchwright.batches.plan.lines import MODEL_CHARACTERS_MAX
from batchwright.batches.store import shard_queue
from batchwright.errors import ConfigurationError, Conflict, InvalidInput
from batchwright.settings import Settings, load_settings

KEY = "BATCHWRIGHT_TEST_KEY"
OURS = {"url": "http://ours:8000", "api_key_env": KEY, "tls_insecure_skip_verify": True, "max_retries": 7}

# Settings ---------------------------------------------------------------------------------------------------------


def settings(**parts: Any) -> Settings:
    return load_settings(parts, environment={})


def test_another_server_gets_neither_the_key_nor_the_tls_settings_of_the_configured_one() -> None:
    gateway = use_server(settings(global_inference_gateway=OURS), "http://theirs:8000", None).global_inference_gateway
    assert (gateway.url, gateway.api_key_env, gateway.tls_insecure_skip_verify) == ("http://theirs:8000", None, False)
    assert gateway.max_retries == 7


def test_the_configured_server_keeps_its_settings_however_its_url_is_written() -> None:
    gateway = use_server(settings(global_inference_gateway=OURS), "http://ours:8000/v1/", None).global_inference_gateway
    assert (gateway.endpoint, gateway.api_key_env, gateway.tls_insecure_skip_verify) == ("http://ours:8000", KEY, True)


def test_a_key_on_the_command_line_replaces_any_other() -> None:
    before = settings(global_inference_gateway={"url": "http://ours:8000", "api_key_name": "ours"})
    for url in (None, "http://ours:8000", "http://theirs:8000"):
        gateway = use_server(before, url, KEY).global_inference_gateway
        assert (gateway.api_key_env, gateway.api_key_name) == (KEY, None)


def test_a_server_on_the_command_line_replaces_the_gateways_of_models() -> None:
    before = settings(model_gateways={"a": {"url": "http://a:8000"}})
    found = use_server(before, "http://theirs:8000", None)
    assert (found.global_inference_gateway.url, found.model_gateways) == ("http://theirs:8000", {})
    assert use_server(before, None, None) is before
    with pytest.raises(ConfigurationError, match="--api-key-env is for one server; add its --url"):
        use_server(before, None, KEY)


def test_a_timeout_on_the_command_line_applies_to_every_server() -> None:
    found = use_server(settings(global_inference_gateway=OURS), None, None, 30.0)
    assert found.global_inference_gateway.request_timeout == 30.0
    found = use_server(settings(), "http://theirs:8000", None, 30.0)
    assert found.global_inference_gateway.request_timeout == 30.0
    found = use_server(settings(model_gateways={"a": {"url": "http://a:8000"}}), None, None, 30.0)
    assert found.model_gateways["a"].request_timeout == 30.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings/", "/v1/v1", "/openai/v1/models"])
def test_a_url_that_contains_a_path_of_requests_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match="which each request adds itself; leave that out of --url"):
        use_server(settings(), f"http://theirs:8000{path}", None)
    assert use_server(settings(), "http://theirs:8000/openai/v1", None).global_inference_gateway.is_set


def test_a_private_worker_serves_only_its_queue_and_stops_quickly() -> None:
    found = private_settings(settings(worker={"queue_limits": {"gpu": 1}}, operations=["shop"]), "~run-0", 512)
    assert (found.worker.queues, found.worker.queue_limits, found.operations) == (("~run-0",), {}, ())
    assert (found.inference.concurrency, found.inference.most_per_model) == (512, 512)
    assert found.worker.stop_grace_seconds == 10.0
    assert private_settings(settings(), "~run-0", 1).inference.model_concurrency_start == 1


def test_the_longest_model_name_fits_into_the_name_of_a_private_queue() -> None:
    run = LocalRun(
        file=Path("a"), sha256="0", endpoint="/v1/embeddings", server="http://ours", output="b", window="24h"
    )
    assert len(shard_queue(run.queue, "m" * MODEL_CHARACTERS_MAX)) == 200


def test_a_lock_has_one_holder_and_is_free_again_afterwards(tmp_path: Path) -> None:
    def held() -> contextlib.AbstractContextManager[Any]:
        return lock_queue(tmp_path / "work", "~run-0")

    with held(), pytest.raises(Conflict, match="runs this batch already"), held():
        pass
    with held() as lock:
        lock.remove()
        with held():
            pass


def test_a_lock_on_a_file_that_is_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes could hold locks on different files of that name."""
    flock, locked = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not locked:
            (tmp_path / "~run-0.lock").unlink()
        locked.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock_queue(tmp_path, "~run-0") as lock:
        assert lock.path.exists()
    assert len(locked) == 2
