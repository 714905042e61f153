"""The fake provider in a separate process, as the tests with kills start it."""

import subprocess
import sys

import httpx
import pytest

from batchwright.errors import SchemaInvalid, Transient
from batchwright.inference.embeddings import RemoteEmbedder
from batchwright.inference.gateway import Gateway
from batchwright.inference.settings import GatewaySettings
from tests.inference.ledger import MemoryLedger


@pytest.fixture
def url():
    command = [sys.executable, "-m", "tests.ingest.fake_provider", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


async def test_it_answers_records_a_bill_and_fails_at_the_given_rates(url):
    gateway = Gateway(GatewaySettings(url=url), environment={})
    ledger = MemoryLedger()
    embedder = RemoteEmbedder(gateway, "small")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await embedder.embed({b"a": "some words"}, ledger)
        bill = (await client.get("/bill")).json()
        assert bill["requests"] == 1
        assert bill["input_tokens"] == ledger.tokens[0]
        (id,) = ledger.usage
        assert (await client.get("/bill", params={"id": id})).json()["entries"][0]["model"] == "small"
        assert (await client.get("/bill", params={"id": "other"})).json()["requests"] == 0
        assert (await client.post("/faults", json={"rates": {"error": 1.0}})).json()["rates"] == {"error": 1.0}
        with pytest.raises(Transient):
            await embedder.embed({b"b": "other words"}, ledger)
        await client.post("/faults", json={"rates": {}, "next": ["invalid"]})
        with pytest.raises(SchemaInvalid):
            await embedder.embed({b"b": "other words"}, ledger)
        assert (await client.get("/bill")).json()["requests"] == 2
        assert (await client.post("/faults", json={"rates": {"typo": 1.0}})).status_code == 400
    await gateway.close()
