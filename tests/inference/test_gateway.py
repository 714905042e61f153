"""`send()`, with a raw server that fails like real ones."""

import asyncio
import dataclasses
import gzip
import logging
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchwright.errors import ConfigurationError
from batchwright.inference import gateway as gateway_module
from batchwright.inference.answers import RateHeaders, Verdict
from batchwright.inference.gateway import Gateway, Gateways, Request
from batchwright.inference.headers import header_pairs
from batchwright.inference.settings import GatewaySettings, InferenceSettings
from tests.conftest import skip
from tests.inference.server import RawServer, answer

KEY = "sk-very-secret-0123456789"


def request(url="/v1/chat/completions", body=b"{}", **options):
    return Request(url=url, body=body, id="batch_req_1", **options)


def gateway(server, *, limits=None, environment=None, **settings):
    settings = GatewaySettings(**{"url": server if isinstance(server, str) else server.url, **settings})
    return Gateway(settings, limits, environment={} if environment is None else environment)


async def test_a_request_goes_out_byte_for_byte_with_its_headers(model_server):
    body = b'{"model" :"m",\t"n":1.0,  "text":"\xc3\xa9"}'
    one = gateway(model_server, api_key_env="KEY", environment={"KEY": KEY}, inference_objective="batch-low")
    sent = await one.send(request(body=body, traceparent="00-1-2-01", headers={"x-tenant": "a", "authorization": "no"}))
    assert sent.succeeded
    assert model_server.lines == ["POST /v1/chat/completions HTTP/1.1"]
    assert model_server.bodies == [body]
    (head,) = model_server.heads
    assert head == {
        "accept": "application/json",
        "accept-encoding": "identity",
        "authorization": f"Bearer {KEY}",
        "content-length": str(len(body)),
        "content-type": "application/json",
        "host": f"127.0.0.1:{model_server.port}",
        "traceparent": "00-1-2-01",
        "user-agent": "batchwright",
        "x-gateway-inference-objective": "batch-low",
        "x-request-id": "batch_req_1",
        "x-tenant": "a",
    }


async def test_fixed_headers_and_the_key_override_those_of_a_request(model_server, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text("Basic first\n")
    fixed = header_pairs({"X-Team": "search", "X-Tenant": "env:TENANT", "x-token": f"file:{tmp_path / 'token'}"})
    environment = {"TENANT": "acme", "KEY": KEY}
    one = gateway(model_server, headers=fixed, api_key_env="KEY", environment=environment)
    theirs = {"x-team": "mine", "x-tenant": "mine", "x-token": "mine", "authorization": "mine", "x-priority": "low"}
    await one.send(request(headers=theirs))
    monkeypatch.setattr(gateway_module, "KEY_SECONDS", 0.0)
    (tmp_path / "token").write_text("Basic second")
    await one.send(request())
    first, second = model_server.heads
    assert (first["x-team"], first["x-tenant"], first["x-token"]) == ("search", "acme", "Basic first")
    assert (first["authorization"], first["x-priority"]) == (f"Bearer {KEY}", "low")
    assert second["x-token"] == "Basic second", "a changed file is read again"
    for text in (repr(one), repr(one.settings), caplog.text):
        assert not any(secret in text for secret in ("acme", "Basic", KEY, "search"))


async def test_a_header_whose_value_cannot_be_read_is_refused_at_start(model_server, tmp_path):
    for value, origin in [("env:NOWHERE", "environment variable NOWHERE"), ("file:/no/where", "file /no/where")]:
        with pytest.raises(ConfigurationError, match=f"the header x-a is the {origin}, which "):
            gateway(model_server, headers=header_pairs({"x-a": value}))


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_end_in_v1_or_not(model_server, tail):
    await gateway(model_server.url + tail).send(request("/v1/embeddings"))
    assert model_server.lines == ["POST /v1/embeddings HTTP/1.1"]


async def test_an_answer_carries_status_body_and_the_servers_request_id(model_server):
    model_server.replies["/a"] = answer(b'{\n"choices": [1]}', "200 OK", "X-Request-Id: up-7")
    model_server.replies["/b"] = answer(b"{}", "429 Too Many", "retry-after: 11")
    one = gateway(model_server)
    good, busy = await one.send(request("/a")), await one.send(request("/b"))
    assert (good.status, good.body, good.request_id) == (200, b'{ "choices": [1]}', "up-7")
    assert (busy.verdict, busy.retry_after, busy.is_overload) == (Verdict.UNAVAILABLE, 11.0, True)
    assert model_server.connections == 1


async def test_an_answer_has_the_servers_rate_limits_if_it_sends_them(model_server):
    one = gateway(model_server)
    assert (await one.send(request())).rates is None
    said = ("limit-requests: 60", "remaining-requests: 59", "reset-requests: 1s", "remaining-tokens: 9000")
    model_server.replies["/a"] = answer(b"{}", "200 OK", *(f"x-ratelimit-{one}" for one in said))
    sent = await one.send(request("/a"))
    assert sent.rates == RateHeaders(
        requests_limit="60", requests_remaining="59", requests_reset="1s", tokens_remaining="9000"
    )


async def test_chunked_answers_and_ends_by_close_are_read_whole(model_server):
    model_server.replies["/chunked"] = (
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    )
    model_server.replies["/close"] = b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"a":1}'
    model_server.then_close.add("/close")
    one = gateway(model_server)
    assert (await one.send(request("/chunked"))).body == b'{"a":1}'
    assert (await one.send(request("/close"))).body == b'{"a":1}'


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "reason"),
    [(None, "connection refused"), ("http://nowhere.invalid:1", "its name is unknown")],
)
async def test_no_connection_means_unavailable(url, reason):
    found = await gateway(url or f"http://127.0.0.1:{unused_port()}").send(request())
    assert (found.verdict, found.code, found.status) == (Verdict.UNAVAILABLE, "connection_failed", None)
    assert found.message == f"the server could not be reached: {reason}"


async def test_a_server_that_does_not_take_the_connection_is_unavailable():
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        limits = InferenceSettings(connect_timeout=0.2)
        found = await gateway(f"http://127.0.0.1:{full.getsockname()[1]}", limits=limits).send(request())
    assert (found.verdict, found.code) == (Verdict.UNAVAILABLE, "connection_failed")
    assert found.message.endswith("no connection within 0.2 s, the inference.connect_timeout")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
    ],
)
async def test_a_connection_lost_after_sending_is_counted_and_never_repeated_unasked(model_server, reply):
    model_server.replies["/x"] = reply
    model_server.then_close.add("/x")
    one = gateway(model_server)
    assert (await one.send(request("/warm"))).succeeded
    found = await one.send(request("/x"))
    assert (found.verdict, found.code) == (Verdict.COUNTED, "connection_lost")
    assert [line.split()[1] for line in model_server.lines] == ["/warm", "/x"]


async def test_no_answer_in_time_is_counted_and_closes_the_connection(model_server):
    model_server.replies["/silent"] = None
    found = await gateway(model_server, request_timeout=0.2).send(request("/silent", seconds_left=60))
    assert (found.verdict, found.code, found.is_overload) == (Verdict.COUNTED, "request_timeout", True)
    assert 0.15 <= found.seconds < 2
    await asyncio.wait_for(model_server.gone, 2)


async def test_half_an_answer_in_time_is_a_timeout_too(model_server):
    model_server.replies["/half"] = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"
    found = await gateway(model_server, request_timeout=0.2).send(request("/half"))
    assert (found.verdict, found.code) == (Verdict.COUNTED, "request_timeout")


async def test_the_deadline_aborts_a_request_and_does_not_count_as_a_failure_of_the_server(model_server):
    model_server.replies["/silent"] = None
    one = gateway(model_server)
    cut = await one.send(request("/silent", seconds_left=0.2))
    assert (cut.code, cut.verdict, cut.is_overload) == ("request_aborted", Verdict.ANSWER, False)
    late = await one.send(request("/never", seconds_left=0.0))
    assert (late.code, late.verdict) == ("batch_expired", Verdict.ANSWER)
    assert len(model_server.lines) == 1


@pytest.mark.parametrize("path", ["/silent", "/half"])
async def test_cancelling_closes_the_socket_within_100_ms(model_server, path):
    model_server.replies |= {"/silent": None, "/half": b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"}
    task = asyncio.create_task(gateway(model_server).send(request(path)))
    await asyncio.wait_for(model_server.arrived.wait(), 5)
    cancelled = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(model_server.gone, 5) - cancelled < 0.1


async def test_an_answer_that_is_too_long_is_cut_off_and_its_connection_closed(model_server):
    limits = InferenceSettings(response_bytes_max=100_000)
    model_server.replies["/big"] = answer(b'{"a": "' + b"x" * 17_000_000 + b'"}')
    model_server.replies["/fits"] = answer(b'{"a": "' + b"x" * 99_991 + b'"}')
    one = gateway(model_server, limits=limits)
    assert len((await one.send(request("/fits"))).body) == 100_000
    found = await one.send(request("/big"))
    assert (found.verdict, found.code, found.body) == (Verdict.ANSWER, "response_too_large", b'""')
    assert "100000 bytes" in found.message
    await asyncio.wait_for(model_server.gone, 5)


async def test_a_wrong_content_length_does_not_lift_the_limit(model_server):
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    model_server.replies["/lies"] = head + chunk * 300 + b"0\r\n\r\n"
    found = await gateway(model_server, limits=InferenceSettings(response_bytes_max=100_000)).send(request("/lies"))
    assert not found.succeeded
    assert len(found.body) <= 2


async def test_a_redirect_is_an_answer_and_the_key_is_not_sent_on(model_server):
    async with RawServer() as other:
        for status in (301, 302, 307, 308):
            model_server.replies[f"/{status}"] = answer(b"", f"{status} Moved", f"location: {other.url}/v1/stolen")
            found = await gateway(model_server, api_key_env="K", environment={"K": KEY}).send(request(f"/{status}"))
            assert (found.verdict, found.status, found.code) == (Verdict.ANSWER, status, "redirect_refused")
        assert other.connections == 0
    assert len(model_server.lines) == 4


async def test_proxies_of_the_environment_are_ignored(model_server):
    async with RawServer() as proxy:
        names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        code = f"""
import asyncio
from batchwright.inference.gateway import Gateway, Request
from batchwright.inference.settings import GatewaySettings
one = Gateway(GatewaySettings(url={model_server.url!r}))
print(asyncio.run(one.send(Request(url="/v1/x", body=b"{{}}", id="r"))).status)
"""
        environment = {**os.environ, **dict.fromkeys(names, proxy.url), "no_proxy": "", "NO_PROXY": ""}
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await asyncio.wait_for(child.communicate(), 30)
        assert out == b"200\n", errors
        assert proxy.connections == 0


async def test_cookies_are_not_kept(model_server):
    model_server.replies["/a"] = answer(b"{}", "200 OK", "set-cookie: who=me; Path=/")
    one = gateway(model_server)
    await one.send(request("/a"))
    await one.send(request("/a"))
    assert all("cookie" not in head for head in model_server.heads)


async def test_a_compressed_answer_that_nobody_asked_for_is_not_unpacked(model_server):
    model_server.replies["/z"] = answer(gzip.compress(b"{}" * 1000), "200 OK", "content-encoding: gzip")
    found = await gateway(model_server).send(request("/z"))
    assert (found.verdict, found.code) == (Verdict.COUNTED, "invalid_response")


async def test_a_header_that_cannot_be_sent_is_final(model_server):
    found = await gateway(model_server).send(request(headers={"x-odd": "a\nb: c"}))
    assert (found.verdict, found.code) == (Verdict.ANSWER, "invalid_request")
    assert model_server.lines == []


async def test_connections_are_reused(model_server):
    one = gateway(model_server)
    for _ in range(20):
        await asyncio.gather(*(one.send(request()) for _ in range(5)))
    assert len(model_server.lines) == 100
    assert model_server.connections <= 10


async def test_closing_ends_what_is_in_flight(model_server):
    model_server.replies["/silent"] = None
    one = gateway(model_server)
    task = asyncio.create_task(one.send(request("/silent")))
    await asyncio.wait_for(model_server.arrived.wait(), 5)
    await one.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    await asyncio.wait_for(model_server.gone, 5)


# Keys


async def test_no_output_shows_a_key(model_server, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    model_server.replies["/drop"] = b""
    settings = GatewaySettings(url=model_server.url, api_key_file=file)
    async with Gateways(settings, {}) as gateways:
        one = gateways.of("any")
        answers = [await one.send(request(path)) for path in ("/ok", "/drop")]
        shown = [gateways, one, one._key, settings, request(headers={"authorization": KEY}), *answers, caplog.text]
        assert model_server.heads[0]["authorization"] == f"Bearer {KEY}"
    assert all(KEY not in form(thing) for thing in shown for form in (repr, str))
    assert KEY not in str(dataclasses.asdict(settings))


async def test_a_changed_key_is_used_after_a_minute_and_if_the_file_is_gone_the_old_one_is_kept(
    model_server, tmp_path, monkeypatch
):
    file = tmp_path / "key"
    file.write_text("first")
    one = gateway(model_server, api_key_file=file)
    await one.send(request())
    file.write_text("second")
    await one.send(request())
    monkeypatch.setattr(gateway_module, "KEY_SECONDS", 0.0)
    await one.send(request())
    file.unlink()
    await one.send(request())
    assert [head["authorization"] for head in model_server.heads] == [
        f"Bearer {key}" for key in ("first", "first", "second", "second")
    ]


async def test_a_key_by_name_is_a_file_among_the_secrets(model_server, tmp_path):
    (tmp_path / "gateway-b-api-key").write_text(KEY)
    settings = GatewaySettings(url=model_server.url, api_key_name="gateway-b-api-key")
    await Gateway(settings, secrets=tmp_path).send(request())
    assert model_server.heads[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("text", ["", "  \n", "two words", "two\nlines", "caf\u00e9"])
def test_a_file_without_a_key_is_refused_without_repeating_it(tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="the gateway's key is the file") as refused:
        gateway("http://x:1", api_key_file=file)
    assert not text.strip() or text.strip() not in str(refused.value)


def test_a_missing_key_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigurationError, match="the environment variable NO_SUCH, which is not set"):
        gateway("http://x:1", api_key_env="NO_SUCH")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        gateway("http://x:1", api_key_file=tmp_path / "absent")


# Which gateway


def test_one_gateway_serves_every_model():
    one = Gateways(GatewaySettings(url="http://a:1"), {})
    assert one.models is None
    assert one.of("x") is one.of("y") is not None


def test_each_model_has_its_gateway_and_equal_settings_share_a_client():
    a, b = GatewaySettings(url="http://a:1"), GatewaySettings(url="http://b:1", max_retries=1)
    both = Gateways(GatewaySettings(), {"llama": a, "llama-lora": dataclasses.replace(a), "mistral": b})
    assert both.models == {"llama", "llama-lora", "mistral"}
    assert both.of("llama") is both.of("llama-lora")
    assert both.of("llama") is not both.of("mistral")
    assert both.of("unknown") is None


def test_two_kinds_of_gateways_or_none_are_refused_with_an_example():
    some = GatewaySettings(url="http://a:1")
    with pytest.raises(ConfigurationError, match="both global_inference_gateway and model_gateways are set; keep"):
        Gateways(some, {"m": some})
    with pytest.raises(ConfigurationError, match=r"\[global_inference_gateway\]\n    url = "):
        Gateways(GatewaySettings(), {})


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    try:
        for command in (
            f"{new} -x509 -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
            f"{new} -keyout peer.key -out peer.csr -subj /CN=peer",
            "openssl x509 -req -in peer.csr -CA ca.pem -CAkey ca.key -set_serial 2 -extfile names -out peer.pem",
            "openssl ec -in peer.key -out old.key",
        ):
            subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        skip("there is no openssl to make certificates with")
    return folder


@pytest.fixture
async def secure(certificates):
    """A server that wants a client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "peer.pem", certificates / "peer.key")
    context.load_verify_locations(certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    server = RawServer()
    await server.__aenter__(ssl=context)
    yield f"https://127.0.0.1:{server.port}"
    await server.__aexit__()


async def test_server_and_client_certificates_are_used(secure, certificates):
    pair = {"tls_client_cert_file": certificates / "peer.pem", "tls_client_key_file": certificates / "peer.key"}
    trusted = await gateway(secure, tls_ca_cert_file=certificates / "ca.pem", **pair).send(request())
    assert trusted.succeeded
    unchecked = await gateway(secure, tls_insecure_skip_verify=True, **pair).send(request())
    assert unchecked.succeeded
    unknown = await gateway(secure, **pair).send(request())
    assert (unknown.code, unknown.verdict) == ("connection_failed", Verdict.UNAVAILABLE)
    assert unknown.message.endswith("its certificate is not trusted")
    anonymous = await gateway(secure, tls_ca_cert_file=certificates / "ca.pem").send(request())
    assert not anonymous.succeeded


def test_certificates_are_checked_at_start(certificates, tmp_path):
    (tmp_path / "garbage.pem").write_text("garbage")
    for file in (tmp_path / "garbage.pem", tmp_path / "absent.pem"):
        with pytest.raises(ConfigurationError, match=r"tls_ca_cert_file .* holds no readable PEM"):
            gateway("https://x:1", tls_ca_cert_file=file)
    for certificate, key, message in [
        ("peer.pem", "ca.key", "no readable PEM pair"),
        ("absent.pem", "peer.key", "no readable PEM pair"),
        ("peer.pem", "old.key", "openssl pkcs8 -topk8"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            gateway(
                "https://x:1",
                tls_client_cert_file=certificates / certificate,
                tls_client_key_file=certificates / key,
            )


def test_the_http_library_is_imported_by_two_modules_only():
    source = Path(gateway_module.__file__).parents[1]
    users = [file.name for file in source.rglob("*.py") if "import wreq" in file.read_text(encoding="utf-8")]
    assert sorted(users) == ["gateway.py", "http.py"], "one module is for model servers, one for services"


async def test_a_timeout_names_its_duration_and_its_setting(model_server):
    model_server.replies["/hang"] = None
    found = await gateway(model_server, request_timeout=0.2).send(request("/hang"))
    assert found.code == "request_timeout"
    assert found.message == "the server did not answer within 0.2 s, the request_timeout"


async def test_the_wrong_scheme_is_named(model_server):
    async def refuse(reader, writer):
        """The server answers like servers of plain HTTP do to a TLS handshake."""
        await reader.read(1)
        writer.write(answer(b"", "400 Bad Request"))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        found = await gateway(f"https://127.0.0.1:{port}").send(request())
    assert (found.verdict, found.code) == (Verdict.UNAVAILABLE, "connection_failed")
    assert found.message.endswith("if it is a plain http server, write http:// instead of https://")
    model_server.replies["/tls"] = b"\x15\x03\x01\x00\x02\x02\x46"
    model_server.then_close.add("/tls")
    found = await gateway(model_server).send(request("/tls"))
    assert found.code == "connection_lost"
    assert found.message.endswith("if it is an https server, write https://, else another port")


async def test_a_redirect_names_the_server_that_it_leads_to_and_no_more(model_server):
    model_server.replies["/a"] = answer(b"", "301 Moved", "location: https://secure.example:8443/v1?key=secret")
    found = await gateway(model_server).send(request("/a"))
    assert found.message == (
        "the server answered 301, a redirect to https://secure.example:8443; redirects are not followed, correct the "
        "gateway's url"
    )


async def test_a_web_page_is_distinguished_from_a_broken_answer(model_server):
    model_server.replies["/a"] = answer(b"\n<!DOCTYPE html><html></html>")
    found = await gateway(model_server).send(request("/a"))
    assert found.message == "the server answered 200 with HTML, as a web site or a proxy does"
