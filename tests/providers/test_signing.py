"""Signed URLs of objects, made locally with the credentials of the environment."""

import os
from urllib.parse import parse_qs, urlsplit

import pytest

from batchwright.errors import Fatal
from batchwright.inference.http import Http
from batchwright.providers.buckets import open_bucket
from batchwright.providers.contract import Input
from batchwright.providers.signing import sign_uri
from batchwright.providers.tools import AdapterTools


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "dGhlLXNlY3JldA==")


async def test_an_object_in_s3_is_signed_for_the_requested_time():
    url = urlsplit(await sign_uri("s3://calls/a b/monday.wav", 3600))
    assert (url.scheme, url.hostname) == ("https", "s3.eu-central-1.amazonaws.com")
    assert url.path == "/calls/a%20b/monday.wav"
    assert parse_qs(url.query)["X-Amz-Expires"] == ["3600"]
    assert "the-secret" not in url.query


async def test_an_object_in_azure_is_signed_for_its_own_account():
    url = urlsplit(await sign_uri("az://account/container/monday.wav", 3600))
    assert (url.hostname, url.path) == ("account.blob.core.windows.net", "/container/monday.wav")
    assert parse_qs(url.query)["sp"] == ["r"]


def test_a_bucket_of_azure_is_in_its_account():
    store = open_bucket("az://account/container")._backend._store
    assert (store.config["account_name"], store.config["container_name"]) == ("account", "container")


async def test_a_bucket_that_cannot_sign_says_what_to_do(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no base64 at all!")
    with pytest.raises(Fatal, match="pass an https URL") as caught:
        await sign_uri("az://account/container/monday.wav", 60)
    assert caught.value.code == "cannot_sign"
    with pytest.raises(Fatal, match="does not name an object"):
        await sign_uri("s3://calls", 60)


async def test_a_stored_file_has_an_object_url_if_the_store_is_a_bucket():
    def audio(uri):
        return Input(id="1", uri=uri, filename="a.wav")

    async with Http() as http:
        tools = AdapterTools(http, place_of_stored="s3://files/{}".format)
        assert tools.place(audio("file:file-1")) == "s3://files/file-1"
        assert tools.place(audio("gs://b/a.wav")) == "gs://b/a.wav"
        assert tools.place(audio("https://example.com/a.wav")) is None
        assert AdapterTools(http).place(audio("file:file-1")) is None
