"""Settings: file < environment < flags, checked at start, with a hint for every mistake."""

import pytest

from batchwright.errors import ConfigurationError
from batchwright.settings import load_settings


def load(tmp_path, text: str = "", environment=None, flags=None):
    file = tmp_path / "batchwright.toml"
    file.write_text(text)
    return load_settings(flags, environment=environment or {}, file=file)


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    text = "[worker]\nconcurrency = 1\npoll_seconds_max = 3.0\nstop_grace_seconds = 7"
    environment = {"BATCHWRIGHT_WORKER_CONCURRENCY": "2", "BATCHWRIGHT_WORKER_POLL_SECONDS_MAX": "4"}
    settings = load(tmp_path, text, environment, {"worker": {"concurrency": 3, "poll_seconds_max": None}})
    assert settings.worker.concurrency == 3
    assert settings.worker.poll_seconds_max == 4.0
    assert settings.worker.stop_grace_seconds == 7.0


def test_lists_and_tables_can_come_from_the_environment(tmp_path):
    environment = {
        "BATCHWRIGHT_OPERATIONS": "shop.jobs,more.py",
        "BATCHWRIGHT_WORKER_QUEUES": '["a"]',
        "BATCHWRIGHT_WORKER_QUEUE_LIMITS": '{"gpu": 1}',
        "BATCHWRIGHT_DATABASE_URL": "postgresql://a,b/c",
    }
    settings = load(tmp_path, "", environment)
    assert settings.operations == ("shop.jobs", "more.py")
    assert settings.worker.queues == ("a",)
    assert settings.worker.queue_limits == {"gpu": 1}
    assert settings.database.url == "postgresql://a,b/c"


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("[worker]\nconcurency = 1", {}, "did you mean worker.concurrency?"),
        ("[wroker]\nconcurrency = 1", {}, "there is no setting wroker"),
        ("[worker]\nconcurrency = 'many'", {}, "the setting worker.concurrency is 'many'"),
        ("[worker]\nconcurrency = 0", {}, "concurrency is 0; it must be at least 1"),
        ("[worker]\npoll_seconds_max = 60", {}, "poll_seconds_max"),
        ("operations = 'shop.jobs'", {}, 'operations = ["shop.jobs"]'),
        ("[engine]\nlease_seconds = 0", {}, "lease_seconds"),
        ("[batches.tenant_weights]\nacme = 0", {}, "batches.tenant_weights.acme is 0; it must be at least 1"),
        ("worker = 3", {}, "worker"),
        ("[worker", {}, "is not TOML"),
        ("", {"BATCHWRIGHT_WORKER_CONCURENCY": "1"}, "did you mean BATCHWRIGHT_WORKER_CONCURRENCY?"),
    ],
)
def test_a_mistake_is_refused_with_a_hint(tmp_path, text, environment, message):
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, text, environment)
    assert message in str(refused.value)


def test_one_operation_from_the_environment_is_a_list_of_one(tmp_path):
    assert load(tmp_path, "", {"BATCHWRIGHT_OPERATIONS": "shop.jobs"}).operations == ("shop.jobs",)
    assert load(tmp_path, "", {"BATCHWRIGHT_WORKER_QUEUES": "gpu"}).worker.queues == ("gpu",)


def test_a_configuration_file_that_was_named_must_exist(tmp_path):
    with pytest.raises(ConfigurationError, match="there is no configuration file"):
        load_settings(environment={"BATCHWRIGHT_CONFIG": str(tmp_path / "absent.toml")})


def test_variables_that_kubernetes_sets_for_a_service_named_batchwright_are_not_settings():
    said = {
        "BATCHWRIGHT_SERVICE_HOST": "10.0.0.7",
        "BATCHWRIGHT_SERVICE_PORT": "8765",
        "BATCHWRIGHT_SERVICE_PORT_HTTP": "8765",
        "BATCHWRIGHT_PORT": "tcp://10.0.0.7:8765",
        "BATCHWRIGHT_API_PORT": "tcp://10.0.0.7:8765",
        "BATCHWRIGHT_API_PORT_8765_TCP": "tcp://10.0.0.7:8765",
        "BATCHWRIGHT_API_PORT_8765_TCP_ADDR": "10.0.0.7",
    }
    assert load_settings(environment=said) == load_settings(environment={})
    assert load_settings(environment={**said, "BATCHWRIGHT_API_PORT": "9000"}).api.port == 9000
