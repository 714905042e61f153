"""Inputs from everywhere, secrets by reference, and buckets with separate credentials."""

import ipaddress

import pytest

from batchwright.errors import Fatal, OperationError, Transient
from batchwright.inference.http import Http
from batchwright.providers.buckets import open_bucket, split_uri
from batchwright.providers.contract import Input
from batchwright.providers.tools import AdapterTools, is_private
from tests.inference.server import RawServer, answer


@pytest.fixture
async def http():
    async with Http() as made:
        yield made


@pytest.fixture
async def server():
    async with RawServer() as made:
        yield made


def audio(uri, **more):
    return Input(id="1", uri=uri, filename="a.wav", **more)


async def content(tools, uri):
    return b"".join([chunk async for chunk in tools.read(audio(uri))])


async def test_a_stored_file_is_read_by_its_id(http):
    async def stored(id):
        yield id.encode()

    tools = AdapterTools(http, open_stored=stored)
    assert await content(tools, "file:file-1") == b"file-1"
    assert await tools.size(audio("file:file-1")) == 6
    assert await tools.size(audio("file:file-1", bytes=9)) == 9


async def test_objects_of_buckets_are_read_and_missing_ones_are_failed_inputs(http, tmp_path):
    tools = AdapterTools(http, bucket=lambda root: open_bucket(f"file://{tmp_path}/{root.partition('://')[2]}"))

    async def chunks():
        yield b"some "
        yield b"audio"

    await tools.bucket("gs://one").write("calls/12 (a).wav", chunks)
    assert await content(tools, "gs://one/calls/12 (a).wav") == b"some audio"
    assert await tools.size(audio("gs://one/calls/12 (a).wav")) == 10
    assert [found.key async for found in tools.bucket("gs://one").list("calls/")] == ["calls/12 (a).wav"]
    with pytest.raises(Fatal) as caught:
        await content(tools, "gs://one/none.wav")
    assert (caught.value.scope, caught.value.code) == ("item", "input_not_found")
    await tools.bucket("gs://one").delete("calls/12 (a).wav", "none")
    assert [found.key async for found in tools.bucket("gs://one").list("calls/")] == []


@pytest.mark.parametrize("uri", ["gs://", "gs://bucket", "gs://bucket/", "az://account/container", "ftp://a/b"])
def test_a_url_that_names_no_object_is_a_failed_input(uri):
    with pytest.raises(Fatal, match="does not name an object"):
        split_uri(uri)


async def test_a_url_is_fetched_without_credentials(http, server):
    server.replies["/a.wav"] = answer(b"audio")
    assert await content(AdapterTools(http, may_fetch_private=True), f"{server.url}/a.wav") == b"audio"
    assert set(server.heads[0]) == {"accept-encoding", "host", "user-agent"}


async def test_a_private_address_is_not_fetched_from(http, server):
    with pytest.raises(Fatal, match="private network") as caught:
        await content(AdapterTools(http), f"http://localhost:{server.port}/a.wav?sig=secret")
    assert caught.value.scope == "item"
    assert server.connections == 0


async def test_where_clouds_keep_credentials_is_never_fetched_from(http):
    with pytest.raises(Fatal, match="always refused") as caught:
        await content(AdapterTools(http, may_fetch_private=True), "http://169.254.169.254/latest/meta-data/")
    assert caught.value.code == "input_refused"


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("127.0.0.1", True),
        ("10.0.0.1", True),
        ("169.254.169.254", True),
        ("::1", True),
        ("::ffff:10.0.0.1", True),
        ("fd00::1", True),
        ("0.0.0.0", True),
        ("8.8.8.8", False),
        ("2001:4860:4860::8888", False),
    ],
)
def test_private_addresses(text, private):
    assert is_private(ipaddress.ip_address(text)) is private


@pytest.mark.parametrize(("status", "kind"), [("404 No", Fatal), ("403 No", Fatal), ("503 Busy", Transient)])
async def test_a_url_that_cannot_be_fetched_shows_no_query(http, server, status, kind):
    server.replies["/a.wav?sig=secret"] = answer(b"", status)
    with pytest.raises(OperationError) as caught:
        await content(AdapterTools(http, may_fetch_private=True), f"{server.url}/a.wav?sig=secret")
    assert type(caught.value) is kind
    assert "secret" not in str(caught.value)


async def test_a_missing_secret_says_where_it_should_be_and_a_secret_is_never_shown(http, tmp_path):
    tools = AdapterTools(http, environment={"KEY": "sk-1"})
    secret = tools.secret("OpenAI's key", variable="KEY")
    assert (secret.text(), secret.missing) == ("sk-1", None)
    assert "sk-1" not in repr(secret)
    missing = tools.secret("OpenAI's key", variable="OTHER")
    assert "OTHER" in missing.missing
    with pytest.raises(Fatal, match="environment variable OTHER") as caught:
        missing.text()
    assert (caught.value.scope, caught.value.code) == ("credential", "credentials_missing")
    assert tools.secret("OpenAI's key").missing == "OpenAI's key is not configured"
    assert str(tmp_path / "no") in tools.secret("OpenAI's key", file=tmp_path / "no").missing
