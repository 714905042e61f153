"""Tokens of Google: given by reference, or obtained with the signature of a service account."""

import base64
import json
import os
from datetime import UTC, datetime
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

from batchwright.errors import ConfigurationError, Fatal, Transient
from batchwright.inference.http import Http
from batchwright.providers.google_auth import SCOPE, GoogleCredentials, GoogleTokens
from batchwright.providers.tools import AdapterTools
from tests.inference.server import RawServer, answer

NOW = datetime(2026, 11, 17, 4, 0, tzinfo=UTC)
EMAIL = "speech@project.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def key():
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
async def http():
    async with Http() as made:
        yield made


@pytest.fixture
async def server():
    async with RawServer() as made:
        yield made


def pem(key):
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*encoding).decode()


@pytest.fixture
def account(tmp_path, key, server):
    file = tmp_path / "account.json"
    said = {
        "type": "service_account",
        "client_email": EMAIL,
        "private_key": pem(key),
        "private_key_id": "key-1",
        "token_uri": f"{server.url}/token",
    }
    file.write_text(json.dumps(said))
    return file


def token(text="ya29.first", seconds=3600):
    return answer(json.dumps({"access_token": text, "expires_in": seconds, "token_type": "Bearer"}).encode())


def tokens(http, *, environment=None, **credentials):
    tools = AdapterTools(http, environment=environment or {}, now=lambda: NOW)
    return GoogleTokens(GoogleCredentials(**credentials), tools)


def decoded(part):
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


async def test_a_token_by_reference_is_used_unchanged(http, tmp_path):
    file = tmp_path / "token"
    file.write_text("ya29.file\n")
    for made in (
        tokens(http, access_token_file=file),
        tokens(http, access_token_env="TOKEN", environment={"TOKEN": "ya29.file"}),
    ):
        assert await made.headers() == {"authorization": "Bearer ya29.file"}
        assert made.missing is None


async def test_a_service_account_signs_for_its_token(http, account, server, key):
    server.replies["/token"] = token()
    assert await tokens(http, service_account_file=account).text() == "ya29.first"
    asked = parse_qs(server.bodies[0].decode())
    assert asked["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
    header, claims, signature = asked["assertion"][0].split(".")
    assert json.loads(decoded(header)) == {"alg": "RS256", "typ": "JWT", "kid": "key-1"}
    now = int(NOW.timestamp())
    assert json.loads(decoded(claims)) == {
        "iss": EMAIL,
        "scope": SCOPE,
        "aud": f"{server.url}/token",
        "iat": now,
        "exp": now + 3600,
    }
    signed = f"{header}.{claims}".encode()
    key.public_key().verify(decoded(signature), signed, padding.PKCS1v15(), hashes.SHA256())


async def test_a_token_is_kept_until_shortly_before_it_expires(http, account, server):
    made = tokens(http, service_account_file=account)
    server.replies["/token"] = token("ya29.short", 200)
    assert await made.text() == "ya29.short"
    server.replies["/token"] = token("ya29.long")
    assert [await made.text() for _ in range(3)] == ["ya29.long"] * 3
    assert len(server.lines) == 2


async def test_another_key_file_means_another_token(http, account, server):
    made = tokens(http, service_account_file=account)
    server.replies["/token"] = token()
    await made.text()
    os.utime(account, ns=(1, 1))
    server.replies["/token"] = token("ya29.second")
    assert await made.text() == "ya29.second"


async def test_the_file_that_the_environment_names_is_the_default(http, account, server):
    server.replies["/token"] = token()
    made = tokens(http, environment={"GOOGLE_APPLICATION_CREDENTIALS": str(account)})
    assert await made.text() == "ya29.first"


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (answer(b'{"error": "invalid_grant"}', "400 Bad Request"), Fatal, "invalid_grant"),
        (answer(b"no", "401 No"), Fatal, "401"),
        (answer(b"", "503 Busy"), Transient, "503"),
        (answer(b"", "429 Slow"), Transient, "429"),
        (answer(b"{}"), Transient, "without a token"),
        (answer(b"<html>"), Transient, "not JSON"),
    ],
)
async def test_a_refusal_stops_the_account_and_an_outage_does_not(http, account, server, reply, kind, message):
    server.replies["/token"] = reply
    with pytest.raises(kind, match=message) as caught:
        await tokens(http, service_account_file=account).text()
    if kind is Fatal:
        assert (caught.value.scope, caught.value.code) == ("credential", "credentials_refused")


async def test_nothing_of_a_bad_key_file_is_shown(http, tmp_path, server):
    file = tmp_path / "account.json"
    elliptic = pem(ec.generate_private_key(ec.SECP256R1()))
    for content in (
        "PRIVATE",
        "[]",
        '{"private_key": "PRIVATE"}',
        json.dumps({"private_key": elliptic, "client_email": EMAIL, "token_uri": server.url}),
    ):
        file.write_text(content)
        with pytest.raises(Fatal, match="cannot be read as the key file") as caught:
            await tokens(http, service_account_file=file).text()
        assert caught.value.scope == "credential"
        assert "PRIVATE" not in str(caught.value)
    assert server.lines == []


async def test_a_signature_is_sent_only_by_https(http, account):
    said = json.loads(account.read_text())
    account.write_text(json.dumps({**said, "token_uri": "http://example.com/token"}))
    with pytest.raises(Fatal, match="not https"):
        await tokens(http, service_account_file=account).text()


async def test_what_is_missing_is_named(http, tmp_path):
    none = tmp_path / "none.json"
    for made, words in (
        (tokens(http), "GOOGLE_APPLICATION_CREDENTIALS"),
        (tokens(http, service_account_file=none), "none.json"),
        (tokens(http, access_token_env="TOKEN"), "TOKEN"),
    ):
        assert words in made.missing
        with pytest.raises(Fatal, match=words) as caught:
            await made.text()
        assert (caught.value.scope, caught.value.code) == ("credential", "credentials_missing")


def test_only_one_reference_may_be_given(tmp_path):
    with pytest.raises(ConfigurationError, match="access_token_env and service_account_file"):
        GoogleCredentials(access_token_env="TOKEN", service_account_file=tmp_path)
