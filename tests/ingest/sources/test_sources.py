"""How sources are named, who may name them, and lists of URLs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigurationError, Fatal, InvalidInput
from batchwright.ingest.sources import (
    FetchSettings,
    FileSource,
    ObjectSource,
    Reason,
    Sources,
    UrlList,
    UrlSource,
    local_roots,
    parse_source,
)
from batchwright.ingest.sources.parse import uri_of
from tests.ingest.sources.conftest import SETTINGS


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/data/./papers/../x", FileSource(path=Path("/data/x"))),
        ("papers", FileSource(path=Path.cwd() / "papers")),
        ("file:///data/a%20b", FileSource(path=Path("/data/a b"))),
        ("file://localhost/data/a?b#c", FileSource(path=Path("/data/a?b#c"))),
        ("@/data/urls.txt", UrlList(path=Path("/data/urls.txt"))),
        ("HTTPS://Example.COM:443", UrlSource(url="https://example.com/")),
        ("http://example.com:8080/a b?q=ü#x", UrlSource(url="http://example.com:8080/a%20b?q=%C3%BC")),
        ("https://bücher.example/%7Ea/", UrlSource(url="https://xn--bcher-kva.example/%7Ea/")),
        ("http://[2606:4700::1]:80/a", UrlSource(url="http://[2606:4700::1]/a")),
        ("s3://bucket", ObjectSource(root="s3://bucket", prefix="")),
        ("S3://bucket/a/b.pdf", ObjectSource(root="s3://bucket", prefix="a/b.pdf")),
        ("gs://bucket/a#b?c", ObjectSource(root="gs://bucket", prefix="a#b?c")),
        ("az://account/container", ObjectSource(root="az://account/container", prefix="")),
        ("az://account/container/a/", ObjectSource(root="az://account/container", prefix="a/")),
    ],
)
def test_a_source_is_read_from_its_text(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("x" * 8_001, "longer than 8000"),
        ("a\x00b", "not text"),
        ("@", "does not name a file"),
        ("/a\ud800", "not text"),
        ("https://example.com/\udc80", "invalid host or port"),
        ("s3://bucket/\udc80", "write it like"),
        ("ftp://example.com/a", "the scheme ftp: is not supported"),
        ("file://server/share", "no host"),
        ("https://", "is not a URL"),
        ("https://exa mple\t.com/", "is not a URL|invalid host or port"),
        ("https://example.com:0/", "is not a URL"),
        ("https://example.com:99999/", "invalid host or port"),
        ("https://user:secret@example.com/", "contains a user or password"),
        ("https://[fe80::1%25eth0]/", "is not a URL|invalid host or port"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///a", "s3://bucket/prefix"),
        ("az://account", "az://account/container/prefix"),
        ("s3://bucket/a/../b", "write it like"),
    ],
)
def test_a_text_that_is_not_a_source_is_refused_with_an_example(text, message):
    with pytest.raises(InvalidInput, match=message) as raised:
        parse_source(text)
    assert raised.value.param == "sources"
    assert "secret" not in str(raised.value)


WORDS = st.text(st.sampled_from("/:.@?#%[]\\ aé\ud800\udc80\x00\n0") | st.characters(), max_size=30)
STARTS = st.sampled_from(["", "@", "file://", "file:///", "http://", "https://a/", "s3://", "az://a/", "gs://b/"])


@given(start=STARTS, rest=WORDS)
@settings(deadline=None)
def test_any_text_is_a_source_or_refused_and_a_url_is_the_same_when_read_again(start, rest):
    try:
        source = parse_source(start + rest)
    except InvalidInput as error:
        str(error).encode()
        return
    if isinstance(source, UrlSource):
        assert source.url.isascii()
        assert parse_source(source.url) == source
    if isinstance(source, FileSource):
        assert parse_source(uri_of(str(source.path))) == source
    if isinstance(source, ObjectSource):
        assert parse_source(source.uri) == source


@pytest.mark.parametrize("source", ["/etc", "/etc/passwd", "file:///etc/passwd", "@/etc/passwd", "s3://bucket/a", "."])
async def test_without_roots_a_caller_can_name_urls_alone(tmp_path, source):
    sources = Sources(FetchSettings())
    with pytest.raises(InvalidInput, match="outside the roots"):
        sources.list([source])
    with pytest.raises(Fatal) as raised:
        await sources.fetch(source, tmp_path / "document")
    assert raised.value.code in ("source_refused", "invalid_uri")
    listing = sources.list(["https://example.com/a.pdf"])
    assert [listed.uri async for listed in listing] == ["https://example.com/a.pdf"]


async def test_a_root_allows_itself_and_everything_below_it_but_no_link_leads_out(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs-secret").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    (tmp_path / "docs-secret" / "a.txt").write_text("secret")
    (tmp_path / "docs" / "out").symlink_to(tmp_path / "docs-secret")
    sources = Sources(FetchSettings(roots=(f"{tmp_path}/docs/",)))
    assert [listed.name async for listed in sources.list([str(tmp_path / "docs")])] == ["a.txt"]
    assert (await sources.fetch(f"file://{tmp_path}/docs/a.txt", tmp_path / "document")).size == 4
    for outside in (
        "docs-secret",
        "docs/../docs-secret",
        "docs/out",
        "docs/out/a.txt",
        "docs/%2e%2e/docs-secret/a.txt",
    ):
        with pytest.raises(InvalidInput, match="outside the roots"):
            sources.list([f"file://{tmp_path}/{outside}"])
        with pytest.raises(Fatal) as raised:
            await sources.fetch(f"file://{tmp_path}/{outside}", tmp_path / "document2")
        assert raised.value.code == "source_refused"


async def test_a_root_may_be_a_link_itself(tmp_path):
    (tmp_path / "release-1").mkdir()
    (tmp_path / "release-1" / "a.txt").write_text("text")
    (tmp_path / "current").symlink_to("release-1")
    sources = Sources(FetchSettings(roots=(f"{tmp_path}/current",)))
    documents = [listed async for listed in sources.list([f"{tmp_path}/current"])]
    assert [listed.uri for listed in documents] == [f"file://{tmp_path}/current/a.txt"]
    assert (await sources.fetch(documents[0].uri, tmp_path / "document")).size == 4


def test_the_user_of_a_command_may_read_any_path_they_name():
    named = [
        "/data/a b",
        "@/data/urls.txt",
        "s3://bucket/p",
        "https://example.com/",
        "/data/a b",
        os.fsdecode(b"/caf\xe9"),
    ]
    roots = local_roots(named)
    assert roots == ("file:///data/a%20b", "file:///data/urls.txt", "s3://bucket/p", "file:///caf%E9")
    "".join(roots).encode()


async def test_a_list_has_one_url_a_line_and_says_which_lines_are_bad(pull, tmp_path):
    (tmp_path / "urls.txt").write_bytes(
        b"\xef\xbb\xbf# papers\r\n\r\nhttps://example.com/a.pdf  # the first\r\nnonsense\n"
        b"  https://EXAMPLE.com/a.pdf#page=2\nhttps://user:secret@example.com/b\n/etc/passwd\n"
        b"https://example.com/caf\xc3\xa9/\nhttps://example.com/a#b\nhttp://\xff\xfe/"
    )
    documents, listing = await pull.list(f"@{tmp_path}/urls.txt", "https://example.com/a.pdf")
    assert [listed.uri for listed in documents] == [
        "https://example.com/a.pdf",
        "https://example.com/caf%C3%A9/",
        "https://example.com/a",
    ]
    assert [listed.name for listed in documents] == ["example.com/a.pdf", "example.com/café", "example.com/a"]
    assert documents[0].metadata == {"host": "example.com"}
    assert (documents[0].etag, documents[0].size) == (None, None)
    assert [skipped.name for skipped in listing.skipped] == [f"urls.txt:{line}" for line in (4, 6, 7, 10)]
    assert all(skipped.reason is Reason.BAD_LINE for skipped in listing.skipped)
    assert "secret" not in str(listing.skipped)
    assert not listing.is_complete


async def test_a_list_of_good_urls_is_complete(pull, tmp_path):
    (tmp_path / "urls.txt").write_text("https://example.com/a\nhttps://example.com/b\n")
    documents, listing = await pull.list(f"@{tmp_path}/urls.txt")
    assert (len(documents), listing.is_complete) == (2, True)


async def test_a_list_that_cannot_be_read_is_refused(pull, tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match=r"urls.txt cannot be read: .* (does not|no longer) exist"):
        await pull.list(f"@{tmp_path}/urls.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="is not a file"):
        await pull.list(f"@{tmp_path}/pipe")
    from batchwright.ingest.sources import service

    monkeypatch.setattr(service, "LIST_BYTES_MAX", 10)
    (tmp_path / "urls.txt").write_text("https://example.com/a\n")
    with pytest.raises(InvalidInput, match="more than 10 bytes"):
        await pull.list(f"@{tmp_path}/urls.txt")


@pytest.mark.parametrize("count", [0, 10_001])
def test_the_number_of_sources_of_a_listing_is_limited(count):
    with pytest.raises(InvalidInput, match=f"there are {count} sources"):
        Sources(SETTINGS).list(["https://example.com/"] * count)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bytes_max": 0}, "bytes_max is 0"),
        ({"documents_max": 0}, "documents_max"),
        ({"seconds": 0}, "seconds is 0"),
        ({"redirects_max": -1}, "redirects_max is -1"),
        ({"include": ("",)}, "the pattern ''"),
        ({"roots": ("papers",)}, "write an absolute path"),
        ({"roots": ("@/data",)}, "write an absolute path"),
        ({"roots": ("https://example.com/",)}, "write an absolute path"),
        ({"roots": ("s3://",)}, "write an absolute path"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        FetchSettings(**settings)


def test_the_clients_are_loaded_only_by_the_first_fetch():
    code = "import sys, batchwright.ingest.sources; print([m for m in ('wreq', 'obstore') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
