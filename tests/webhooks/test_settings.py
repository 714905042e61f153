"""Webhooks in the settings: valid settings, and the messages for invalid ones."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.errors import ConfigurationError
from batchwright.settings import load_settings
from batchwright.webhooks.settings import EVENT_TYPES, WebhookSettings

PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def load(tmp_path, text="", environment=None):
    file = tmp_path / "batchwright.toml"
    file.write_text(text)
    return load_settings(environment=environment or {}, file=file)


def test_the_example_of_the_docs_is_valid(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    settings = load(tmp_path, text).webhooks
    assert {tenant: len(endpoints) for tenant, endpoints in settings.items()} == {"default": 2, "team-a": 1}
    first, second = settings["default"]
    assert first.events == EVENT_TYPES
    assert second.events == ("batch.failed", "batch.expired")
    assert (first.timeout_seconds, second.timeout_seconds) == (10.0, 30.0)


def test_the_environment_names_endpoints_as_json_and_replaces_those_of_the_file(tmp_path):
    text = '[[webhooks.default]]\nurl = "http://file:1"\nsecret_env = "A"'
    value = '{"a": [{"url": "http://env:1", "secret_env": "B"}]}'
    assert set(load(tmp_path, text).webhooks) == {"default"}
    found = load(tmp_path, text, {"BATCHWRIGHT_WEBHOOKS": value}).webhooks
    assert found == {"a": (WebhookSettings(url="http://env:1", secret_env="B"),)}
    assert load(tmp_path).webhooks == {}


HOOK = '[[webhooks.default]]\nurl = "https://a/x"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[webhooks.default]]\nsecret_env = 'A'", 'a webhook has no url; write url = "https://'),
        (HOOK, "has no secret; write one of secret_name, secret_file, secret_env"),
        (HOOK + "secret_env = 'A'\nsecret_name = 'b'", "has secret_name and secret_env; write one of"),
        (HOOK + "secret_name = '../b'", "secret_name is '../b'; it names a file directly under /etc/.secrets"),
        (HOOK + "secret_env = 'A'\nevent = []", "there is no setting webhooks.default.event; did you mean events?"),
        (HOOK + "secret_env = 'A'\nevents = []", "has no events; leave `events` out"),
        (HOOK + "secret_env = 'A'\nevents = ['batch.done']", "the setting webhooks.default.0.events.0 is 'batch.done'"),
        (HOOK + "secret_env = 'A'\ntimeout_seconds = 61", "timeout_seconds of the webhook a-"),
        (HOOK + "secret_env = 'A'\ntimeout_seconds = 0", "use more than 0 and at most 60"),
        (HOOK + "secret_env = 'A'\n" + HOOK + "secret_env = 'B'", "twice; join their `events` in one"),
        (HOOK.replace("[[", "[").replace("]]", "]"), "write [[webhooks.default]]"),
        ("[[webhooks]]\nurl = 'https://a'", "write [[webhooks.default]]"),
        (
            HOOK.replace("https://a/x", "ftp://a/x") + "secret_env = 'A'",
            "a webhook's url is 'ftp://a/x'; write it like",
        ),
        (HOOK.replace("https://a/x", "https:///x") + "secret_env = 'A'", "write it like https://example.com/hooks"),
        (HOOK.replace("https://a/x", "https://a:99999/x") + "secret_env = 'A'", "write it like https://"),
        (HOOK.replace("https://a/x", "https://a/x#y") + "secret_env = 'A'", "write it like https://"),
        (HOOK.replace("https://a/x", "https://a/x y") + "secret_env = 'A'", "write it like https://"),
        (HOOK.replace("https://a/x", "https://a/\u00e9") + "secret_env = 'A'", "write it like https://"),
    ],
)
def test_a_mistake_is_refused_with_a_hint(tmp_path, text, message):
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@a/x",
        "https://me:hunter2@a:99999/x",
        "https://me:hunter2@[a/x",
        "https://a/hunter2 ",
        "https://a/hunter2#x",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path, url):
    with pytest.raises(ConfigurationError, match="a webhook's url") as refused:
        load(tmp_path, HOOK.replace("https://a/x", url) + "secret_env = 'A'")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["secret_env", "secret_name", "secret_file"])
def test_a_secret_where_its_name_belongs_is_refused_and_not_repeated(tmp_path, name):
    with pytest.raises(ConfigurationError, match="has the secret itself in its settings") as refused:
        load(tmp_path, HOOK + f"{name} = '{SECRET}'")
    assert SECRET[10:] not in str(refused.value)


def test_an_endpoint_keeps_its_name_while_its_url_stays():
    one = WebhookSettings(url="https://a:1/token", secret_env="A")
    other = WebhookSettings(url="https://a:1/token", secret_env="B", events=("batch.failed",), timeout_seconds=1)
    assert one.name == other.name
    assert one.name != WebhookSettings(url="https://a:1/token/", secret_env="A").name
    assert one.name.startswith("a:1-")
    assert "token" not in one.name


def test_reading_settings_loads_no_http_client():
    code = "import sys, batchwright.settings; print('wreq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
