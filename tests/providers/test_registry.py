"""The folder is the registry; a new provider is one file."""

import importlib.metadata
import textwrap

import pytest

from batchwright.errors import ConfigurationError
from batchwright.inference.http import Http
from batchwright.providers.contract import Adapter
from batchwright.providers.registry import find_adapters, make_adapter, read_settings
from batchwright.providers.tools import AdapterTools

ONE_FILE = '''
"""A provider that exists in this test only."""

from dataclasses import dataclass

from batchwright.providers.contract import Abilities, Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AcmeSettings:
    base_url: str = "https://acme.example"
    speed: int = 1


class Common(Adapter):
    abilities = Abilities(task_types=frozenset({"completion"}), can_cancel=False, can_find=False)


class Acme(Common):
    name = "NAME"
    title = "Acme"
    Settings = AcmeSettings

    def stage(self, request, staged):
        raise SystemExit("nobody stages here")

    submit = find = poll = results = stage

    async def check(self):
        return f"speed {self.settings.speed}"
'''


@pytest.fixture
async def tools():
    async with Http() as http:
        yield AdapterTools(http, environment={})


def folder(tmp_path, name="acme"):
    (tmp_path / "acme.py").write_text(textwrap.dedent(ONE_FILE).replace("NAME", name))
    return str(tmp_path)


def test_all_built_in_adapters_are_found_and_complete():
    kinds = find_adapters()
    assert {"anthropic", "azure_openai", "gemini", "groq", "mistral", "openai", "together", "vertex"} <= set(kinds)
    assert list(kinds) == sorted(kinds)
    for name, kind in kinds.items():
        assert issubclass(kind, Adapter)
        assert kind.name == name
        assert kind.title
        assert kind.abilities.task_types
        assert kind.abilities.duplicates.endswith(".")
        assert kind.__module__ == f"batchwright.providers.adapters.{name}"


async def test_a_provider_is_added_by_one_file_in_a_folder(tmp_path, tools):
    kinds = find_adapters([folder(tmp_path)])
    assert await make_adapter(kinds, "acme", {"speed": 3}, tools).check() == "speed 3"
    assert "acme" not in find_adapters()


async def test_a_provider_is_added_by_an_installed_package(tmp_path, monkeypatch, tools):
    (tmp_path / "acme_package.py").write_text(ONE_FILE.replace("NAME", "acme"))
    entry = importlib.metadata.EntryPoint("acme", "acme_package:Acme", "batchwright.providers")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [entry] if group == "batchwright.providers" else []
    )
    assert await make_adapter(find_adapters(), "acme", {}, tools).check() == "speed 1"


def test_two_providers_of_one_name_are_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"two providers are called 'openai': batchwright.*:OpenAI.* and .*Acme"
    ):
        find_adapters([folder(tmp_path, "openai")])


async def test_an_unknown_provider_is_refused_with_a_hint(tools):
    with pytest.raises(ConfigurationError, match="no provider 'opnai'; did you mean 'openai'"):
        make_adapter(find_adapters(), "opnai", {}, tools)
    with pytest.raises(ConfigurationError, match=r"use one of: .*mistral"):
        make_adapter(find_adapters(), "zzz", {}, tools)


def test_settings_are_checked_and_secrets_are_not_repeated():
    kind = find_adapters()["openai"]
    assert read_settings(kind, {}).base_url == "https://api.openai.com/v1"
    with pytest.raises(ConfigurationError, match="no setting api_key_nv; did you mean api_key_env"):
        read_settings(kind, {"api_key_nv": "X"})
    with pytest.raises(ConfigurationError, match="setting requests_max of the provider openai") as caught:
        read_settings(kind, {"requests_max": "sk-secret"})
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("openai", {"base_url": "api.openai.com"}, "write it like"),
        ("openai", {"base_url": "https://a.com/v1?key=secret"}, "without a query"),
        ("openai", {"base_url": "https://user:secret@a.com"}, "user or password"),
        ("azure_openai", {}, "needs its base_url"),
        ("mistral", {"timeout_hours": 0}, "1 to 168"),
        ("vertex", {"bucket": "gs://b"}, "vertex.project"),
        ("vertex", {"project": "p", "bucket": "b"}, "gs://bucket/folder"),
        ("vertex", {"project": "p", "bucket": "gs://b", "location": "a/../b"}, "vertex.location"),
        ("vertex", {"project": "p", "bucket": "gs://b", "access_token_env": "A", "access_token_file": "f"}, "only one"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, settings, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_settings(find_adapters()[name], settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("europe-west4", "https://europe-west4-aiplatform.googleapis.com"),
        ("global", "https://aiplatform.googleapis.com"),
    ],
)
def test_the_location_of_vertex_decides_its_url(location, url):
    kind = find_adapters()["vertex"]
    assert read_settings(kind, {"project": "p", "bucket": "gs://b", "location": location}).url == url


async def test_a_key_in_a_file_overrides_the_environment(tmp_path, tools):
    (tmp_path / "key").write_text("sk-file")
    adapter = make_adapter(find_adapters(), "openai", {"api_key_file": str(tmp_path / "key")}, tools)
    assert (await adapter.headers())["authorization"] == "Bearer sk-file"
    assert adapter.missing_credentials() is None
    assert "OPENAI_API_KEY" in make_adapter(find_adapters(), "openai", {}, tools).missing_credentials()
