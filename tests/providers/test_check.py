"""`batchwright check` tries the configured providers, and says what to do about those that fail."""

import importlib.util
import socket

import pytest

from batchwright.db.check import Level
from batchwright.inference.http import Http
from batchwright.providers import check
from batchwright.providers.check import check_providers
from batchwright.providers.directory import Directory
from batchwright.providers.settings import TaskSettings
from batchwright.providers.tools import AdapterTools
from batchwright.settings import load_settings
from batchwright.simulator.providers import running
from tests.conftest import skip
from tests.providers.task_stage import SECRET, VARIABLE, provider_tables, server_bucket
from tests.providers.test_registry import ONE_FILE


class Checked:
    """The parts of the part that the check needs: its tables, and the providers that they name."""

    def __init__(self, tables, tools, **tasks):
        settings = load_settings({"providers": tables, "tasks": tasks}, environment={})
        self.providers = settings.table("providers", dict)
        self.directory = Directory(self.providers, settings.table("tasks", TaskSettings), tools)


@pytest.fixture
async def server():
    async with running() as server:
        yield server


@pytest.fixture
async def tools(server, tmp_path):
    async with Http() as http:
        yield AdapterTools(
            http, environment={VARIABLE: SECRET, "KEY_ID": "AKIATEST"}, bucket=server_bucket(server, tmp_path)
        )


def tables_of(server, *names):
    tables = provider_tables(server)
    return {name: tables[name] for name in names or tables}


async def found(part):
    return {one.name.removeprefix("provider "): one for one in await check_providers(part)}


async def test_every_working_provider_is_reported_as_working(server, tools):
    if importlib.util.find_spec("aiobotocore") is None:
        skip("aiobotocore is not installed")
    findings = await found(Checked(tables_of(server), tools))
    assert {name: (one.level, one.remedy) for name, one in findings.items()} == dict.fromkeys(
        provider_tables(server), (Level.OK, None)
    )
    assert findings["openai"].text == f"OpenAI at {server.urls['openai']} accepts the key"
    assert server.jobs() == []


async def test_only_providers_with_a_table_or_with_credentials_are_tried(server, tools, tmp_path):
    assert await found(Checked({}, tools)) == {}
    (tmp_path / "acme.py").write_text(ONE_FILE.replace("NAME", "acme"))
    findings = await found(Checked(tables_of(server, "mistral"), tools, adapters=[str(tmp_path)]))
    assert {name: one.level for name, one in findings.items()} == {"acme": Level.OK, "mistral": Level.OK}
    assert findings["acme"].text == "speed 1"


@pytest.mark.parametrize("name", ["openai", "anthropic", "gemini", "vertex", "azure", "sarvam"])
async def test_a_wrong_key_is_named_as_such(server, tools, name):
    tools.environment[VARIABLE] = "wrong"
    finding = (await found(Checked(tables_of(server, name), tools)))[name]
    assert finding.level is Level.ERROR
    assert finding.text.startswith("its credential is refused: ")
    assert finding.remedy.startswith("replace it")


async def test_a_missing_variable_is_named(server, tools):
    del tools.environment[VARIABLE]
    finding = (await found(Checked(tables_of(server, "openai"), tools)))["openai"]
    assert finding.level is Level.ERROR
    assert VARIABLE in finding.text
    assert finding.remedy == "set it, or remove the provider from the configuration"
    assert server.requests(port="api") == []


async def test_an_unreachable_service_is_a_warning(server, tools):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    tables = tables_of(server, "openai", "mistral")
    tables["openai"]["base_url"] = url
    findings = await found(Checked(tables, tools))
    assert (findings["openai"].level, findings["mistral"].level) == (Level.WARNING, Level.OK)
    assert findings["openai"].remedy == "check that this machine can reach it; tasks for it wait until then"


async def test_a_service_that_does_not_answer_is_not_waited_for(server, tools, monkeypatch):
    monkeypatch.setattr(check, "_SECONDS", 0.2)
    server.put_faults("hang:route=openai.list")
    findings = await found(Checked(tables_of(server, "openai", "mistral"), tools))
    assert findings["openai"].text == "no answer within 0.2 seconds"
    assert findings["openai"].level is Level.WARNING
    assert findings["mistral"].level is Level.OK


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"kind": "opnai"}, "there is no such adapter"),
        ({"kind": "openai", "api_key_nv": "X"}, "did you mean api_key_env"),
        ({"kind": "azure_openai"}, "needs its base_url"),
    ],
)
async def test_a_table_that_is_wrong_is_named(server, tools, table, words):
    findings = await found(Checked({"mine": table, **tables_of(server, "mistral")}, tools))
    assert findings["mine"].level is Level.ERROR
    assert words in findings["mine"].text
    assert findings["mine"].remedy == "correct [providers.mine] in the configuration"
    assert findings["mistral"].level is Level.OK


async def test_missing_adapters_are_reported_as_one_error(tools, tmp_path):
    part = Checked({}, tools, adapters=[str(tmp_path / "nothing.py")])
    (finding,) = await check_providers(part)
    assert (finding.name, finding.level) == ("providers", Level.ERROR)
    assert "nothing.py" in finding.text
