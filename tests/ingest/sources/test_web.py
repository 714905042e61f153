"""Documents by URL: what is accepted, what is refused, and what each answer means for the item."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ipaddress
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import Fatal, OperationError, RateLimited, Transient
from batchwright.inference.addresses import is_private
from batchwright.ingest.sources import FetchSettings, NotModified, Sources
from batchwright.ingest.sources.web import Web, _name
from tests.inference.server import RawServer, answer
from tests.ingest.sources.conftest import SETTINGS


async def refusal(fetching, kind=Fatal):
    with pytest.raises(OperationError) as raised:
        await asyncio.wait_for(fetching, 15)
    assert type(raised.value) is kind, raised.value
    if kind is Fatal:
        assert raised.value.scope == "item"
    return raised.value


async def test_a_document_is_fetched_without_credentials_into_a_private_file(pull, server):
    server.replies["/a/b.pdf?x=1"] = answer(b"%PDF", "200 OK", "content-type: Application/PDF; a=b", 'etag: "v1"')
    fetched = await pull.fetch(f"{server.url}/a/b.pdf?x=1#page=2")
    assert (fetched.size, fetched.path.read_bytes()) == (4, b"%PDF")
    assert fetched.sha256 == hashlib.sha256(b"%PDF").hexdigest()
    assert (fetched.name, fetched.media_type, fetched.etag) == ("b.pdf", "application/pdf", 'etag "v1"')
    assert stat.S_IMODE(fetched.path.stat().st_mode) == 0o600
    assert set(server.heads[0]) == {"accept-encoding", "host", "user-agent"}
    assert server.heads[0]["accept-encoding"] == "identity"
    assert pull.leftovers == []


@pytest.mark.parametrize(
    ("header", "etag", "asks"),
    [
        ('etag: W/"v1"', 'etag W/"v1"', ("if-none-match", 'W/"v1"')),
        (
            "last-modified: Tue, 15 Oct 2024 12:00:00 GMT",
            "modified Tue, 15 Oct 2024 12:00:00 GMT;4",
            ("if-modified-since", "Tue, 15 Oct 2024 12:00:00 GMT"),
        ),
    ],
)
async def test_an_unchanged_document_is_not_fetched_again(pull, server, header, etag, asks):
    server.replies["/a"] = answer(b"text", "200 OK", header)
    first = await pull.fetch(f"{server.url}/a")
    assert first.etag == etag
    server.replies["/a"] = b"HTTP/1.1 304 Not Modified\r\n\r\n"
    first.path.unlink()
    assert await pull.fetch(f"{server.url}/a", etag=etag) == NotModified(etag=etag)
    assert server.heads[1][asks[0]] == asks[1]
    assert not first.path.exists()
    assert pull.leftovers == []


async def test_a_304_without_a_condition_in_the_request_is_an_error(pull, server):
    server.replies["/a"] = b"HTTP/1.1 304 Not Modified\r\n\r\n"
    await refusal(pull.fetch(f"{server.url}/a"), Transient)


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        ("404 No", Fatal, "source_gone"),
        ("410 Gone", Fatal, "source_gone"),
        ("401 No", Fatal, "source_refused"),
        ("403 No", Fatal, "source_refused"),
        ("400 No", Fatal, "source_refused"),
        ("204 Nothing", Fatal, "source_refused"),
        ("206 Part", Fatal, "source_refused"),
        ("300 Choose", Fatal, "source_refused"),
        ("301 No location", Fatal, "source_refused"),
        ("408 Slow", Transient, "source_unavailable"),
        ("500 Oops", Transient, "source_unavailable"),
        ("503 Busy", Transient, "source_unavailable"),
        ("429 Wait", RateLimited, "source_busy"),
    ],
)
async def test_the_status_decides_the_reaction_and_no_message_shows_a_signature(pull, server, status, kind, code):
    server.replies["/a?sig=secret"] = answer(b"", status, "retry-after: 7")
    error = await refusal(pull.fetch(f"{server.url}/a?sig=secret"), kind)
    assert error.code == code
    assert "127.0.0.1" in str(error)
    assert "secret" not in str(error)
    assert getattr(error, "retry_after", 7) == 7
    assert pull.leftovers == []


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", b"gopher\r\n\r\n"])
async def test_a_lost_connection_is_transient(pull, server, reply):
    server.replies["/a"] = reply
    server.then_close.add("/a")
    error = await refusal(pull.fetch(f"{server.url}/a"), Transient)
    assert error.code == "source_unavailable"
    assert pull.leftovers == []


async def test_a_chunked_body_that_is_cut_short_is_an_error(pull, server):
    server.replies["/a"] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n"
    server.then_close.add("/a")
    await refusal(pull.fetch(f"{server.url}/a"), Transient)


async def test_a_refused_connection_is_transient(pull, unused_tcp_port):
    error = await refusal(pull.fetch(f"http://127.0.0.1:{unused_tcp_port}/a"), Transient)
    assert "connection refused" in str(error)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "[::]",
        "0.0.0.0",
        "0",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "255.255.255.255",
        "[fe80::1]",
        "[fd00::1]",
        "[ff02::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a00:1]",
        "[64:ff9b::a00:1]",
        "[2002:7f00:1::]",
    ],
)
async def test_private_addresses_are_refused_without_connecting(pull, server, host):
    error = await refusal(pull.fetch(f"http://{host}:{server.port}/a?sig=secret", private=False))
    assert error.code == "source_refused"
    assert "private network" in str(error)
    assert "secret" not in str(error)
    assert server.connections == 0


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("224.0.0.1", True),
        ("fec0::1", True),
        ("240.0.0.1", True),
        ("64:ff9b::7f00:1", True),
        ("64:ff9b::808:808", False),
        ("2002:a00:1::", True),
        ("2002:808:808::1", False),
        ("2001:0:0a00:1::", True),
        ("8.8.8.8", False),
        ("2606:4700::1", False),
    ],
)
def test_an_address_embedded_in_another_one_decides(text, private):
    assert is_private(ipaddress.ip_address(text)) is private


def public(*addresses):
    """A rule that makes only these addresses public, so that a loopback address can act as the internet."""
    return lambda address: str(address) not in addresses


async def test_a_redirect_to_a_private_address_is_refused_before_connecting(http, server, tmp_path):
    async with RawServer() as other:
        web = Web(http, SETTINGS, is_refused=public("127.0.0.1"))
        server.replies["/a"] = answer(b"", "302 Found", f"location: http://127.0.0.2:{other.port}/secret")
        error = await refusal(Sources(SETTINGS, web=web).fetch(f"{server.url}/a", tmp_path / "document"))
        assert error.code == "source_refused"
        assert "127.0.0.2 is in a private network" in str(error)
        assert (server.connections, other.connections) == (1, 0)


async def test_a_name_that_resolves_to_another_address_is_refused_by_the_address_of_the_connection(
    http, server, tmp_path
):
    async def as_public(_):
        return [ipaddress.ip_address("93.184.215.14")]

    server.replies["/a"] = answer(b"secret")
    sources = Sources(SETTINGS, web=Web(http, SETTINGS, resolve=as_public))
    error = await refusal(sources.fetch(f"http://localhost:{server.port}/a", tmp_path / "document"))
    assert "private network" in str(error)
    assert server.connections == 1
    assert list(tmp_path.iterdir()) == []


async def test_a_reused_connection_is_checked_again(http, server, tmp_path):
    allowed = Sources(SETTINGS, web=Web(http, SETTINGS, is_refused=public("127.0.0.1")))
    assert (await allowed.fetch(f"{server.url}/a", tmp_path / "document")).size == 2

    async def as_public(_):
        return [ipaddress.ip_address("93.184.215.14")]

    sources = Sources(SETTINGS, web=Web(http, SETTINGS, resolve=as_public))
    await refusal(sources.fetch(f"{server.url}/a", tmp_path / "document"))
    assert server.connections == 1


async def test_redirects_are_followed_and_the_last_name_counts(pull, server):
    server.replies["/a"] = answer(b"", "301 Moved", "location: b?x=1")
    server.replies["/b?x=1"] = answer(b"", "307 Moved", f"location: {server.url}/c/report.md#end")
    server.replies["/c/report.md"] = answer(b"# Text")
    fetched = await pull.fetch(f"{server.url}/a", etag='etag "v1"')
    assert (fetched.name, fetched.size) == ("report.md", 6)
    assert [head["if-none-match"] for head in server.heads] == ['"v1"'] * 3


async def test_a_loop_of_redirects_ends(pull, server):
    server.replies["/a"] = answer(b"", "302 Found", "location: /b")
    server.replies["/b"] = answer(b"", "302 Found", "location: /a")
    error = await refusal(pull.fetch(f"{server.url}/a", redirects_max=4))
    assert "more than 4 times" in str(error)
    assert len(server.lines) == 5


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://example.com/a",
        "http://user:secret@127.0.0.1/a",
        "gopher:",
        "http://[::1",
        "//",
        "http:///a",
    ],
)
async def test_a_redirect_to_anything_but_a_web_url_is_refused(pull, server, location):
    server.replies["/a"] = answer(b"", "302 Found", f"location: {location}")
    error = await refusal(pull.fetch(f"{server.url}/a"))
    assert error.code == "source_refused"
    assert "secret" not in str(error)


async def test_a_redirect_out_of_tls_is_refused():
    from batchwright.ingest.sources.web import _next_url

    class Answer:
        status = 302
        headers = {"location": "http://example.com/a"}

    with pytest.raises(Fatal, match="from https to http"):
        _next_url("https://example.com/a", Answer)


@pytest.mark.parametrize("url", ["http://user:secret@127.0.0.1/a", "https://secret@example.com/", "http://a\\@b/"])
async def test_credentials_in_a_url_are_refused_and_not_repeated(pull, url):
    error = await refusal(pull.fetch(url, roots=[]))
    assert error.code == "invalid_uri"
    assert "secret" not in str(error)


async def test_a_body_that_says_it_is_too_large_is_not_read(pull, server):
    server.replies["/a"] = b"HTTP/1.1 200 OK\r\ncontent-length: 3000001\r\n\r\nx"
    error = await refusal(pull.fetch(f"{server.url}/a"))
    assert error.code == "document_too_large"
    assert "3,000,001 bytes" in str(error)


async def test_an_endless_body_is_cut_off_at_the_limit(pull, endless):
    error = await refusal(pull.fetch(f"{endless.url}/a"))
    assert error.code == "document_too_large"
    await asyncio.wait_for(endless.gone.wait(), 10)
    assert endless.sent["bytes"] < 20_000_000
    assert pull.leftovers == []


async def test_a_body_that_arrives_too_slowly_times_out(pull, endless):
    endless.sent.update(piece=b"x", pause=0.01)
    error = await refusal(pull.fetch(f"{endless.url}/a", seconds=0.4), Transient)
    assert error.code == "source_slow"
    await asyncio.wait_for(endless.gone.wait(), 10)
    assert pull.leftovers == []


async def test_a_silent_server_times_out(pull, server):
    server.replies["/a"] = None
    error = await refusal(pull.fetch(f"{server.url}/a", seconds=0.3), Transient)
    assert error.code == "source_slow"


async def test_a_compressed_body_is_unpacked_up_to_the_same_limit(pull, server):
    text = os.urandom(1_000) * 2_500
    server.replies["/a"] = answer(gzip.compress(text), "200 OK", "content-encoding: gzip")
    assert (await pull.fetch(f"{server.url}/a")).path.read_bytes() == text
    server.replies["/bomb"] = answer(gzip.compress(bytes(50_000_000)), "200 OK", "content-encoding: gzip")
    assert (await refusal(pull.fetch(f"{server.url}/bomb"))).code == "document_too_large"
    server.replies["/cut"] = answer(gzip.compress(text)[:-20], "200 OK", "content-encoding: gzip")
    await refusal(pull.fetch(f"{server.url}/cut"), Transient)
    server.replies["/bad"] = answer(b"not gzip", "200 OK", "content-encoding: gzip")
    await refusal(pull.fetch(f"{server.url}/bad"))
    server.replies["/br"] = answer(b"x", "200 OK", "content-encoding: br")
    assert "'br'" in str(await refusal(pull.fetch(f"{server.url}/br")))


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/", [], "127.0.0.1"),
        ("/a/b%20c.pdf", [], "b c.pdf"),
        ("/download?id=7", ['content-disposition: attachment; filename="report.docx"'], "report.docx"),
        ("/x", ["content-disposition: attachment; filename*=UTF-8''gr%C3%BCn.pdf"], "grün.pdf"),
        ("/x", ["content-disposition: attachment; filename=a.txt; filename*=iso-8859-1'en'gr%FCn.pdf"], "grün.pdf"),
        ("/x", ["content-disposition: attachment; filename*=unicode_escape''%5Cud800; filename=a.txt"], "a.txt"),
        ("/x", ['content-disposition: inline; FileName = "say \\"hi\\"; now.md"'], 'say "hi"; now.md'),
        ("/x", ["content-disposition: attachment; filename=grün.md"], "grün.md"),
        ("/x", ['content-disposition: attachment; filename="../../etc/passwd"'], "passwd"),
        ("/x", ['content-disposition: attachment; filename="..\\..\\boot.ini"'], "boot.ini"),
        ("/x.pdf", ["content-disposition: attachment; filename="], "x.pdf"),
        ("/x%0a%1b[31m.txt", [], "x\\n\\x1b[31m.txt"),
        ("/export", ["content-type: text/csv; charset=utf-8"], "export.csv"),
        ("/export.csv", ["content-type: application/json"], "export.csv"),
        ("/page", ["content-type: text/html"], "page"),
    ],
)
async def test_a_document_gets_the_name_that_its_server_gives(pull, server, path, headers, name):
    server.replies[path] = answer(b"text", "200 OK", *headers)
    assert (await pull.fetch(f"{server.url}{path}")).name == name


CHARSETS = ["utf-8", "ISO-8859-1", "unicode_escape", "nonsense"]


@given(
    text=st.text(st.characters(max_codepoint=255), max_size=40),
    before=st.sampled_from(["", 'filename="', "filename=", *(f"filename*={name}''" for name in CHARSETS)]),
)
@settings(deadline=None)
def test_no_header_leads_to_an_unsafe_name(text, before):
    class Answer:
        headers = {"content-disposition": f"attachment; {before}{text}"}

    name = _name("https://example.com/x", Answer, None)
    name.encode()
    assert name
    assert "/" not in name
    assert not any(character < " " for character in name)


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[fd00:ec2::254]", "0.0.0.0", "[::ffff:169.254.1.1]"])
async def test_the_credentials_of_a_cloud_machine_are_never_fetched(pull, server, host):
    error = await refusal(pull.fetch(f"http://{host}:{server.port}/latest/meta-data", private=True))
    assert error.code == "source_refused"
    assert server.connections == 0


async def test_a_client_that_the_sources_made_themselves_is_closed(server, tmp_path):
    sources = Sources(FetchSettings(private=True))
    assert (await sources.fetch(f"{server.url}/a", tmp_path / "document")).size == 2
    await sources.close()
    await sources.close()
