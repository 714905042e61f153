"""Gateways and limits in the configuration, by the names of llm-d's batch gateway."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.errors import ConfigurationError
from batchwright.inference.settings import GatewaySettings, InferenceSettings, seconds
from batchwright.settings import load_settings, settings_document, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "gateways.md"


def load(tmp_path, text="", environment=None, flags=None):
    file = tmp_path / "batchwright.toml"
    file.write_text(text)
    return load_settings(flags, environment=environment or {}, file=file)


def test_the_examples_of_the_docs_are_valid(tmp_path):
    examples = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    one, many, routed, fair = (load(tmp_path, text) for text in examples)
    # The first example spells out the defaults.
    assert one.global_inference_gateway == GatewaySettings(url="http://inference-gateway:8000")
    assert one.model_gateways == {}
    assert set(many.model_gateways) == {"llama-3", "mistral"}
    assert many.model_gateways["mistral"].request_timeout == 120.0
    assert many.model_gateways["mistral"].tls_ca_cert_file == Path("/etc/tls/ca.pem")
    assert many.model_gateways["llama-3"].request_timeout == 300.0
    assert many.inference.most_per_model == 150
    gateway = routed.global_inference_gateway
    assert dict(gateway.headers) == {"x-gateway-team": "search", "x-router-key": "file:/etc/.secrets/router-key"}
    assert gateway.passthrough_headers == ("x-priority", "x-tenant-id")
    assert routed.batches.header_key_file == Path("/etc/.secrets/headers.key")
    assert fair.batches.tenant_weights == {"acme": 3}


GATEWAY = '[global_inference_gateway]\nurl = "http://a:1"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('headers = { Host = "b" }', "headers has host, which is set automatically for each request"),
        ('headers = { Content-Length = "5" }', "headers has content-length, which is set"),
        ('headers = { Transfer-Encoding = "chunked" }', "headers has transfer-encoding, which is set"),
        ('headers = { "x team" = "b" }', "headers has 'x team', which is not a header name"),
        ('headers = { x-a = "secret\\nx-b: 1" }', "headers has a value for x-a that cannot be sent"),
        ('headers = { x-a = "secret", X-A = "c" }', "headers has x-a twice"),
        ("headers = { x-a = 5 }", "a value in headers is not a string"),
        ('headers = "x-a: secret"', "headers is a table"),
        ('headers = { Authorization = "secret" }\napi_key_env = "KEY"', "has a key, which is sent as authorization"),
        ('passthrough_headers = ["Authorization"]', "which is meant for this API"),
        ('passthrough_headers = ["Cookie"]', "which is meant for this API"),
        ('passthrough_headers = ["Connection"]', "passthrough_headers has connection, which is set"),
        ('passthrough_headers = ["x-a"]\nheaders = { X-A = "secret" }', "sets x-a itself and passes it through"),
        (
            'passthrough_headers = ["x-gateway-inference-objective"]\ninference_objective = "low"',
            "sets x-gateway-inference-objective itself",
        ),
    ],
)
def test_headers_that_would_break_a_request_or_reveal_secrets_are_refused(tmp_path, text, complaint):
    with pytest.raises(ConfigurationError, match=re.escape(complaint)) as raised:
        load(tmp_path, GATEWAY + text)
    assert "secret" not in str(raised.value)


def test_operators_may_set_authorization_and_headers_can_come_from_the_environment(tmp_path):
    environment = {
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_HEADERS": '{"Authorization": "env:BASIC"}',
        "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_PASSTHROUGH_HEADERS": "X-B,x-a",
    }
    settings = load(tmp_path, GATEWAY, environment)
    assert settings.global_inference_gateway.headers == (("authorization", "env:BASIC"),)
    assert settings.passthrough_headers == {"x-a", "x-b"}
    assert settings_of(settings_document(settings)) == settings


def test_without_gateways_a_queue_without_batches_starts(tmp_path):
    settings = load(tmp_path)
    assert not settings.global_inference_gateway.is_set
    assert settings.inference == InferenceSettings()
    assert (settings.inference.concurrency, settings.inference.most_per_model) == (100, 100)


def test_the_environment_names_gateways_too(tmp_path):
    one = load(
        tmp_path,
        "",
        {
            "BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL": "http://a:1",
            "BATCHWRIGHT_INFERENCE_CONCURRENCY": "7",
            "BATCHWRIGHT_INFERENCE_MODEL_CONCURRENCY_START": "7",
        },
    )
    assert one.global_inference_gateway.url == "http://a:1"
    assert one.inference.concurrency == 7
    text = '[model_gateways."m"]\nurl = "http://file:1"'
    many = load(
        tmp_path, text, {"BATCHWRIGHT_MODEL_GATEWAYS": '{"n": {"url": "http://env:1", "request_timeout": "90s"}}'}
    )
    assert set(many.model_gateways) == {"n"}
    assert many.model_gateways["n"].request_timeout == 90.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5m", 300.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        (12, 12),
        ("12", 12.0),
        ("5 minutes", "5 minutes"),
    ],
)
def test_durations_are_read_as_the_source_writes_them(text, expected):
    assert seconds(text) == expected


GATEWAY = "[global_inference_gateway]\nurl = 'http://a:1'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GATEWAY + "[model_gateways.m]\nurl = 'http://b:1'",
            "both global_inference_gateway and model_gateways are set",
        ),
        (GATEWAY + "api_key = 'sk-1'", "there is no setting global_inference_gateway.api_key; did you mean"),
        (GATEWAY + "max_retrys = 1", "did you mean global_inference_gateway.max_retries?"),
        (
            "[model_gateways.m]\nurl = 'http://b:1'\nmax_retrys = 1",
            'model_gateways."m".max_retrys; did you mean max_retries?',
        ),
        ("[model_gateways.m]\nmax_retries = 1", 'a gateway has settings but no url; write url = "http://host:8000"'),
        ("[model_gateways.m]", 'model_gateways."m" has no url'),
        ("[global_inference_gateway]\nmax_retries = 1", "a gateway has settings but no url"),
        ("[global_inference_gateway]\nurl = 'gateway:8000'", "write http://gateway:8000"),
        ("[global_inference_gateway]\nurl = 'http://a:99999'", "write it like http://gateway:8000"),
        ("[global_inference_gateway]\nurl = 'http://a:1/?key=1'", "write it like http://gateway:8000"),
        ("[global_inference_gateway]\nurl = 'http://${HOST}:8000'", "write it like http://gateway:8000"),
        ("[global_inference_gateway]\nurl = 'http://gate way:8000'", "write it like http://gateway:8000"),
        (GATEWAY + "request_timeout = 'soon'", "the setting global_inference_gateway.request_timeout is 'soon'"),
        (GATEWAY + "request_timeout = 0", "must be above 0"),
        (GATEWAY + "request_timeout = inf", "must be above 0"),
        (GATEWAY + "initial_backoff = nan", "must be above 0"),
        (GATEWAY + "max_backoff = inf", "must be above 0"),
        (GATEWAY + "max_backoff = '500ms'", "max_backoff not below initial_backoff"),
        (GATEWAY + "max_retries = -1", "write 0 for no retries"),
        (GATEWAY + "concurrency_total = 0", "at least 1"),
        (GATEWAY + "requests_per_minute = inf", "leave it out"),
        (GATEWAY + "tokens_per_minute = nan", "at least 1"),
        (GATEWAY + "api_key_name = 'a'\napi_key_env = 'B'", "has api_key_name and api_key_env; keep one of them"),
        (GATEWAY + "api_key_name = '../shadow'", "it names a file directly under /etc/.secrets"),
        (GATEWAY + "tls_client_cert_file = 'c.pem'", "belong together"),
        ("[inference]\nmodel_concurrency_max = 200", "model_concurrency_max (200) <= concurrency (100) does not hold"),
        ("[inference]\nmodel_concurrency_min = 0", "does not hold"),
        ("[inference]\nresponse_bytes_max = 10", "response_bytes_max is 10"),
        ("[inference]\nconnect_timeout = '0s'", "connect_timeout is 0.0"),
        ("[inference]\nconnect_timeout = inf", "connect_timeout is inf"),
    ],
)
def test_a_mistake_is_refused_with_a_hint(tmp_path, text, message):
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, text)
    assert message in str(refused.value)


def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(ConfigurationError, match="api_key_file instead") as refused:
        load(tmp_path, "[global_inference_gateway]\nurl = 'http://me:hunter2@a:1'")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@[a", "me:hunter2@a:8000", "http://me:hunter2@a:99999", "http://a:1?api-key=hunter2"]
)
def test_an_invalid_url_that_may_contain_a_secret_is_not_repeated(tmp_path, url):
    with pytest.raises(ConfigurationError, match="a gateway's url") as refused:
        load(tmp_path, f"[global_inference_gateway]\nurl = '{url}'")
    assert "hunter2" not in str(refused.value)


def test_reading_settings_loads_no_http_client():
    code = "import sys, batchwright.settings; print('wreq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
