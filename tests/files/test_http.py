"""Files over HTTP: uploads in any order and of any kind, lists, ranges, and what failed uploads leave behind."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from batchwright.batches.part import BatchesPart
from batchwright.batches.settings import BatchSettings
from batchwright.errors import Conflict, DatabaseUnavailable, StorageFull, StorageUnavailable
from batchwright.files.http import FORM_BYTES_MAX
from batchwright.files.store import Files
from tests.api.conftest import Api, fails, serving, stored_file

LIMIT = 100_000
TOO_LARGE = "File is too large. The limit of this server is 100000 bytes (batches.file_bytes_max)."
LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}'


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[Api]:
    """A server with a small limit for files, and a smaller one for all other bodies."""
    parts = {"batches": BatchSettings(file_bytes_max=LIMIT)}
    async with serving(database_url, parts=parts, body_bytes_max=LIMIT // 2, jobs_bytes_max=LIMIT // 2) as api:
        yield api


async def upload(
    http: httpx.AsyncClient, data: bytes = LINES, *, headers: dict[str, str] | None = None, **fields: str
) -> httpx.Response:
    fields = {"purpose": "batch", **fields}
    return await http.post("/v1/files", files={"file": ("lines.jsonl", data)}, data=fields, headers=headers)


def form(*parts: tuple[str, bytes], boundary: str = "xYz") -> dict[str, Any]:
    """A form as bytes, from the Content-Disposition of each part."""
    body = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary.encode(), names.encode(), value)
        for names, value in parts
    )
    content = body + b"--%b--\r\n" % boundary.encode()
    return {"content": content, "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


FILE = ('name="file"; filename="lines.jsonl"', LINES)
PURPOSE = ('name="purpose"', b"batch")


async def rows(api: Api) -> int:
    ((n,),) = await api.sql("SELECT count(*) FROM batchwright.file")
    return int(n)


async def objects(api: Api) -> list[str]:
    """The contents of the store, including drafts."""
    root = Path(str(api.batchwright.store))
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


async def nothing_is_left(api: Api) -> None:
    assert (await rows(api), await objects(api)) == (0, [])


# Upload -----------------------------------------------------------------------------------------------------------


async def test_an_upload_is_shown_as_openai_shows_it(api: Api) -> None:
    http = await api.client()
    answer = await upload(http)
    assert answer.status_code == 200
    file = answer.json()
    assert file["id"].startswith("file-")
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(LINES),
        "created_at": file["created_at"],
        "filename": "lines.jsonl",
        "purpose": "batch",
        "status": "processed",
        "expires_at": file["created_at"] + 30 * 24 * 3600,
        "status_details": None,
    }
    assert (await http.get(f"/v1/files/{file['id']}")).json() == file
    assert (await http.get(f"/v1/files/{file['id']}/content")).content == LINES
    ((digest, key),) = await api.sql("SELECT sha256, key FROM batchwright.file")
    assert digest == hashlib.sha256(LINES).hexdigest()
    assert await objects(api) == [key]


@pytest.mark.parametrize("data", [b"", b"\0\xff\r\n--xYz", b"\xef\xbb\xbf{}\r\n", b"\r\n" * 1000])
async def test_any_bytes_come_back_as_they_were_sent(api: Api, data: bytes) -> None:
    http = await api.client()
    file = (await upload(http, data)).json()
    assert file["bytes"] == len(data)
    assert (await http.get(f"/v1/files/{file['id']}/content")).content == data


@pytest.mark.parametrize("parts", [(PURPOSE, FILE), (FILE, PURPOSE)])
async def test_the_parts_of_a_form_may_come_in_any_order(api: Api, parts: tuple[tuple[str, bytes], ...]) -> None:
    answer = await (await api.client()).post("/v1/files", **form(*parts))
    assert (answer.status_code, answer.json()["filename"]) == (200, "lines.jsonl")


@pytest.mark.parametrize(
    ("names", "filename"),
    [
        ('name="file"', "upload.jsonl"),
        ('name="file"; filename=""', "upload.jsonl"),
        ('name="file"; filename="../../etc/passwd"', "passwd"),
        ('name="file"; filename="C:\\\\data\\\\in.jsonl"', "in.jsonl"),
        ('name="file"; filename="zeilen mit \xfc.txt"', "zeilen mit \xfc.txt"),
        ("name=\"file\"; filename*=UTF-8''%e2%82%ac.jsonl", "€.jsonl"),
    ],
)
async def test_a_file_may_have_any_name_or_none(api: Api, names: str, filename: str) -> None:
    http = await api.client()
    file = (await http.post("/v1/files", **form((names, LINES), PURPOSE))).json()
    assert file["filename"] == filename
    answer = await http.get(f"/v1/files/{file['id']}/content")
    assert answer.headers["content-disposition"].startswith('attachment; filename="')
    assert answer.headers["content-disposition"].isascii()


async def test_each_purpose_has_its_own_time_and_other_purposes_are_refused(api: Api) -> None:
    http = await api.client()
    for purpose in ("assistants", "fine-tune", "vision", "user_data", "evals"):
        file = (await upload(http, purpose=purpose)).json()
        assert (file["purpose"], file["expires_at"]) == (purpose, None)
    before = await objects(api)
    for purpose in ("batch_output", "assistants_output", "", "Batch"):
        for order in (0, 1):
            parts = [('name="purpose"', purpose.encode()), FILE]
            answer = await http.post("/v1/files", **form(*parts[::-1] if order else parts))
            message = fails(answer, 400, "invalid_value", "purpose")
            assert message.startswith(f"Invalid value: '{purpose}'. Supported values are: 'assistants', 'batch',")
    assert await objects(api) == before


async def test_a_file_expires_at_the_given_time(api: Api) -> None:
    http = await api.client()
    for seconds in (3600, 2_592_000):
        times = {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}
        for purpose in ("batch", "user_data"):
            file = (await upload(http, purpose=purpose, **times)).json()
            assert file["expires_at"] - file["created_at"] == seconds
    await api.sql("UPDATE batchwright.file SET expires_at = now()")
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
        fails(await http.get(path), 404, param="id")
    fails(await http.delete(f"/v1/files/{file['id']}"), 404, param="id")
    assert (await http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"expires_after[anchor]": "created_at"}, "missing_required_parameter", "expires_after[seconds]"),
        ({"expires_after[seconds]": "3600"}, "missing_required_parameter", "expires_after[anchor]"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "invalid_value", "expires_after[anchor]"),
        ({"expires_after[seconds]": "3599"}, "integer_below_min_value", "expires_after[seconds]"),
        ({"expires_after[seconds]": "2592001"}, "integer_above_max_value", "expires_after[seconds]"),
        ({"expires_after[seconds]": "-1"}, "integer_below_min_value", "expires_after[seconds]"),
        ({"expires_after[seconds]": "1h"}, "invalid_type", "expires_after[seconds]"),
        ({"expires_after[seconds]": "\u0663\u0666\u0660\u0660"}, "invalid_type", "expires_after[seconds]"),
        ({"expires_after[seconds]": ""}, "invalid_type", "expires_after[seconds]"),
        ({"expires_after[seconds]": "9" * 30}, "invalid_type", "expires_after[seconds]"),
        ({"expires_after": "3600"}, "unknown_parameter", "expires_after"),
        ({"colour": "red"}, "unknown_parameter", "colour"),
    ],
)
async def test_invalid_fields_are_refused_and_nothing_is_kept(
    api: Api, fields: dict[str, str], code: str, param: str
) -> None:
    http = await api.client()
    given = [(f'name="{name}"', value.encode()) for name, value in fields.items()]
    for parts in ([PURPOSE, *given, FILE], [FILE, PURPOSE, *given]):
        fails(await http.post("/v1/files", **form(*parts)), 400, code, param)
    await nothing_is_left(api)


async def test_incomplete_forms_are_refused_and_nothing_is_kept(api: Api) -> None:
    http = await api.client()
    whole = form(FILE, PURPOSE)
    cut = {**whole, "content": whole["content"][:-5]}
    long = (f'name="file"; filename="{"x" * 513}"', LINES)
    wrong: list[tuple[dict[str, Any], str | None, str | None]] = [
        (form(PURPOSE), "missing_required_parameter", "file"),
        (form(FILE), "missing_required_parameter", "purpose"),
        (form(FILE, FILE, PURPOSE), "invalid_request", "file"),
        (form(FILE, PURPOSE, PURPOSE), "invalid_request", "purpose"),
        (form(FILE, ('name="other"; filename="x"', LINES), PURPOSE), "unknown_parameter", "other"),
        (form(('name="purpose"; filename="x"', b"batch"), FILE), "unknown_parameter", "purpose"),
        (form(long, PURPOSE), "string_above_max_length", "file"),
        (form(FILE, ('name="purpose"', b"\xff")), "invalid_request", "purpose"),
        (cut, "invalid_request", None),
        ({"json": {"purpose": "batch"}}, "invalid_request", None),
        ({"content": LINES}, "invalid_request", None),
        ({"content": b"", "headers": whole["headers"]}, "invalid_request", None),
        ({"data": {"purpose": "batch", "file": "x"}}, "invalid_request", None),
        ({"content": whole["content"], "headers": {"Content-Type": "multipart/form-data"}}, "invalid_request", None),
    ]
    for request, code, param in wrong:
        fails(await http.post("/v1/files", **request), 400, code, param)
        await nothing_is_left(api)


async def test_a_file_may_have_every_byte_of_the_limit_and_not_one_more(api: Api) -> None:
    http = await api.client()
    assert (await upload(http, b"x" * LIMIT)).json()["bytes"] == LIMIT
    before = await objects(api)
    assert fails(await upload(http, b"x" * (LIMIT + 1)), 400) == TOO_LARGE
    assert (await rows(api), await objects(api)) == (1, before)


async def test_an_upload_is_refused_while_it_still_arrives(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield form(PURPOSE, ('name="file"', b"begin"))["content"].removesuffix(b"\r\n--xYz--\r\n")
        while True:
            sent += 1000
            assert sent <= LIMIT + 2000, "the server must not read beyond the limit"
            yield b"x" * 1000

    http = await api.client()
    answer = await http.post("/v1/files", content=endless(), headers=form()["headers"])
    assert fails(answer, 400) == TOO_LARGE
    assert answer.json()["error"]["code"] is None
    await nothing_is_left(api)


async def test_an_upload_that_announces_too_much_is_refused_at_once(api: Api) -> None:
    async def nobody() -> AsyncIterator[bytes]:
        raise AssertionError("the server must not read the body")
        yield b""

    http = await api.client()
    headers = {**form()["headers"], "Content-Length": str(LIMIT + FORM_BYTES_MAX + 1)}
    answer = await http.post("/v1/files", content=nobody(), headers=headers)
    assert fails(answer, 400, param="file") == TOO_LARGE


async def test_other_routes_keep_their_own_limit(api: Api) -> None:
    http = await api.client()
    big = {"job_type": "echo", "payload": {"value": "x" * (LIMIT // 2)}}
    fails(await http.post("/v1/jobs", json=big), 413, "too_large")
    fails(await http.post("/v1/batches", json=big), 413, "too_large")
    fails(await http.put("/v1/files", content=b"x" * LIMIT), 413, "too_large")
    assert (await upload(http, b"x" * LIMIT)).status_code == 200


async def test_fields_beside_the_file_are_limited(api: Api) -> None:
    http = await api.client()
    many = [(f'name="f{n}"', b"") for n in range(100)]
    fails(await http.post("/v1/files", **form(FILE, *many)), 413, "too_large")
    fails(await http.post("/v1/files", **form(FILE, ('name="purpose"', b"x" * 70_000))), 413, "too_large")
    await nothing_is_left(api)


# Repeating --------------------------------------------------------------------------------------------------------


async def test_the_same_key_gives_the_same_file_and_another_body_is_a_conflict(api: Api) -> None:
    http = await api.client()
    key = {"Idempotency-Key": "k"}
    first = await upload(http, headers=key)
    again = await upload(http, headers=key)
    assert again.json() == first.json()
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    for other in (await upload(http, b"other", headers=key), await upload(http, headers=key, purpose="evals")):
        assert first.json()["id"] in fails(other, 409, "conflict")
        assert other.headers["x-should-retry"] == "false"
    assert (await rows(api), len(await objects(api))) == (1, 1)
    theirs = await api.client()
    assert (await upload(theirs, headers={"Idempotency-Key": "other"})).json()["id"] != first.json()["id"]


async def test_a_key_is_free_again_when_its_file_is_gone(api: Api) -> None:
    http = await api.client()
    key = {"Idempotency-Key": "k"}
    first = (await upload(http, headers=key)).json()
    await http.delete(f"/v1/files/{first['id']}")
    second = (await upload(http, headers=key)).json()
    assert second["id"] != first["id"]
    await api.sql("UPDATE batchwright.file SET expires_at = now()")
    third = await upload(http, headers=key)
    assert third.json()["id"] not in (first["id"], second["id"])
    assert "idempotent-replayed" not in third.headers


async def test_a_key_belongs_to_its_tenant(api: Api) -> None:
    key = {"Idempotency-Key": "k"}
    mine, theirs = await api.holder("submit", tenant="a"), await api.holder("submit", tenant="b")
    first = await upload(mine, headers=key)
    other = await upload(theirs, b"other", headers=key)
    assert (first.status_code, other.status_code) == (200, 200)
    assert first.json()["id"] != other.json()["id"]


async def test_simultaneous_uploads_with_one_key_make_one_file(api: Api) -> None:
    http = await api.client()
    answers = await asyncio.gather(*(upload(http, headers={"Idempotency-Key": "k"}) for _ in range(8)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 7
    assert (await rows(api), len(await objects(api))) == (1, 1)


# What goes wrong --------------------------------------------------------------------------------------------------


async def test_a_commit_whose_answer_was_lost_makes_no_second_file(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = api.batchwright.part(BatchesPart).files.add, 0

    async def forgetful(self: Any, new: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        answer = await add(new, **options)
        if calls == 1:
            raise DatabaseUnavailable("the answer was lost")
        return answer

    monkeypatch.setattr(Files, "add", forgetful)
    http = await api.client()
    answer = await upload(http)
    assert (answer.status_code, calls) == (200, 2)
    assert "idempotent-replayed" not in answer.headers
    assert (await rows(api), len(await objects(api))) == (1, 1)


@pytest.mark.parametrize(
    ("error", "status", "kept"),
    [(DatabaseUnavailable("away"), 503, 1), (Conflict("no"), 409, 0)],
)
async def test_bytes_are_kept_if_their_row_may_have_been_committed(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kept: int
) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Files, "add", failing)
    fails(await upload(await api.client()), status)
    assert len(await objects(api)) == kept


@pytest.mark.parametrize(
    ("error", "code"),
    [(StorageFull("no room in /secret/place"), "storage_full"), (StorageUnavailable("away"), "storage_unavailable")],
)
async def test_if_the_store_refuses_the_file_the_client_is_asked_to_retry_later(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(type(api.batchwright.store), "put", failing)
    answer = await upload(await api.client())
    assert "secret" not in fails(answer, 503, code)
    assert "retry-after" in answer.headers
    assert await rows(api) == 0


async def test_a_client_that_disconnects_during_an_upload_leaves_nothing_and_logs_no_error(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()
    put = api.batchwright.store.put

    async def noted(self: Any, key: str, source: Any, **options: Any) -> Any:
        begun.set()
        return await put(key, source, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(api.batchwright.store), "put", noted)
        server = await api.batchwright.server()
        server.start()
        try:
            for body in (form(PURPOSE, FILE)["content"][:-40], form(FILE, PURPOSE)["content"][:-5]):
                begun.clear()
                await gone_away(server.url, body, begun)
        finally:
            await server.close()
    await nothing_is_left(api)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def gone_away(url: str, body: bytes, begun: asyncio.Event) -> None:
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/files HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 5000\r\n"
    head += f"Content-Type: {form()['headers']['Content-Type']}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.wait_for(begun.wait(), 10)
    writer.close()
    await writer.wait_closed()


# Get, list, download and delete -----------------------------------------------------------------------------------


async def test_files_are_listed_page_by_page_in_both_orders(api: Api) -> None:
    http = await api.client()
    ids = [(await stored_file(api.batchwright, purpose="batch" if n % 2 else "evals")).id for n in range(7)]
    for order, wanted in (("desc", ids[::-1]), ("asc", ids)):
        found: list[str] = []
        after: dict[str, str] = {}
        for _ in range(4):
            page = (await http.get("/v1/files", params={"limit": 2, "order": order, **after})).json()
            found += [one["id"] for one in page["data"]]
            assert (page["object"], page["first_id"], page["last_id"]) == (
                "list",
                found[len(found) - len(page["data"])],
                found[-1],
            )
            assert page["has_more"] == (len(found) < 7)
            after = {"after": page["last_id"]}
        assert found == wanted
    only = (await http.get("/v1/files", params={"purpose": "batch"})).json()
    assert [one["id"] for one in only["data"]] == ids[1::2][::-1]
    empty = (await http.get("/v1/files", params={"purpose": "vision"})).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_lists_refuse_unknown_parameters(api: Api) -> None:
    http = await api.client()
    for params, code in (
        ({"limit": 0}, "integer_below_min_value"),
        ({"limit": 10_001}, "integer_above_max_value"),
        ({"limit": "many"}, "invalid_type"),
        ({"order": "random"}, "invalid_value"),
        ({"after": ""}, "empty_string"),
        ({"colour": "red"}, "unknown_parameter"),
        ({"after": "file-unknown"}, "invalid_value"),
    ):
        fails(await http.get("/v1/files", params=params), 400, code, *params)


async def test_a_page_continues_after_a_file_that_was_deleted_meanwhile_but_not_after_an_unknown_one(api: Api) -> None:
    mine, theirs = await api.holder(tenant="a"), await api.holder(tenant="b")
    first, second, third = [(await upload(mine)).json()["id"] for _ in range(3)]
    assert (await mine.delete(f"/v1/files/{second}")).status_code == 200
    for order, rest in (("desc", first), ("asc", third)):
        page = (await mine.get("/v1/files", params={"after": second, "order": order})).json()
        assert [one["id"] for one in page["data"]] == [rest]
    for http, id in ((theirs, second), (mine, "file-" + "0" * 32)):
        message = fails(await http.get("/v1/files", params={"after": id}), 400, "invalid_value", "after")
        assert message == f"No such File object: {id}"


async def test_a_deleted_file_is_gone(api: Api) -> None:
    http = await api.client()
    id = (await upload(http)).json()["id"]
    assert (await http.delete(f"/v1/files/{id}")).json() == {"id": id, "object": "file", "deleted": True}
    for answer in (
        await http.get(f"/v1/files/{id}"),
        await http.get(f"/v1/files/{id}/content"),
        await http.delete(f"/v1/files/{id}"),
        await http.get("/v1/files/file-unknown"),
    ):
        asked = answer.request.url.path.split("/")[3]
        error = {"message": f"No such File object: {asked}", "type": "invalid_request_error"}
        assert answer.json() == {"error": {**error, "param": "id", "code": None}}
        fails(answer, 404)
    assert (await http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("range", "part"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=2-5", (2, 6)),
        ("bytes=5-", (5, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=8-99", (8, 10)),
        ("bytes=10-", None),
        ("bytes=99-100", None),
        ("bytes=-0", None),
    ],
)
async def test_a_range_is_served(api: Api, range: str, part: tuple[int, int] | None) -> None:
    http = await api.client()
    data = b"0123456789"
    id = (await stored_file(api.batchwright, data)).id
    answer = await http.get(f"/v1/files/{id}/content", headers={"Range": range})
    if part is None:
        fails(answer, 416, "range_not_satisfiable", "range")
        assert answer.headers["content-range"] == "bytes */10"
        return
    assert (answer.status_code, answer.content) == (206, data[slice(*part)])
    assert answer.headers["content-range"] == f"bytes {part[0]}-{part[1] - 1}/10"
    assert answer.headers["content-length"] == str(part[1] - part[0])


@pytest.mark.parametrize(
    "range",
    [
        "",
        "bytes=",
        "bytes=-",
        "bytes=5-2",
        "bytes=0-1,3-4",
        "bytes=" + "0-1," * 100 + "3-4",
        "lines=0-1",
        "bytes = 0-1",
    ],
)
async def test_a_request_without_a_single_valid_range_gets_the_whole_file(api: Api, range: str) -> None:
    http = await api.client()
    id = (await stored_file(api.batchwright, b"0123456789")).id
    answer = await http.get(f"/v1/files/{id}/content", headers={"Range": range})
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"0123456789", "10")
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-type"] == "application/octet-stream"


async def test_a_range_is_served_only_if_the_file_is_unchanged(api: Api) -> None:
    http = await api.client()
    ids = [(await stored_file(api.batchwright, data)).id for data in (b"0123456789", b"abcdefghij")]
    mine, other = [(await http.get(f"/v1/files/{id}/content")).headers["etag"] for id in ids]
    for validator, status, content in (
        (mine, 206, b"56789"),
        (other, 200, b"0123456789"),
        (f"W/{mine}", 200, b"0123456789"),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 200, b"0123456789"),
    ):
        headers = {"Range": "bytes=5-", "If-Range": validator}
        answer = await http.get(f"/v1/files/{ids[0]}/content", headers=headers)
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (status, content, mine)


async def test_an_empty_file_has_no_range(api: Api) -> None:
    http = await api.client()
    id = (await stored_file(api.batchwright, b"")).id
    assert (await http.get(f"/v1/files/{id}/content")).content == b""
    fails(await http.get(f"/v1/files/{id}/content", headers={"Range": "bytes=0-"}), 416)


async def test_a_download_is_read_part_by_part_and_only_while_the_client_is_connected(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1024 * 1024
    id = (await stored_file(api.batchwright, bytes(8 * mib))).id
    asked: list[int] = []
    part = type(api.batchwright.store)._part

    async def noted(self: Any, key: str, start: int, end: int, etag: Any) -> bytes:
        asked.append(end - start)
        return await part(self, key, start, end, etag)

    monkeypatch.setattr(type(api.batchwright.store), "_part", noted)
    server = await api.batchwright.server()
    server.start()
    try:
        async with (
            httpx.AsyncClient(base_url=server.url) as http,
            http.stream("GET", f"/v1/files/{id}/content") as answer,
        ):
            assert answer.headers["content-length"] == str(8 * mib)
            first = await anext(answer.aiter_raw())
            assert first
    finally:
        await server.close()
    assert asked
    assert max(asked) <= mib
    assert len(asked) < 8


async def test_a_missing_object_is_an_error_and_not_a_partial_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    http = await api.client()
    file = await stored_file(api.batchwright)
    await api.batchwright.store.delete(file.key)
    fails(await http.get(f"/v1/files/{file.id}/content"), 404, "not_found")

    async def away(*_: object) -> None:
        raise StorageUnavailable("away")

    monkeypatch.setattr(type(api.batchwright.store), "head", away)
    fails(await http.get(f"/v1/files/{file.id}/content"), 503, "storage_unavailable")


async def test_tenants_see_only_their_own_files(api: Api) -> None:
    mine, theirs = await api.holder(tenant="a"), await api.holder("read", "submit", "operate", tenant="b")
    id = (await upload(mine)).json()["id"]
    for answer in (
        await theirs.get(f"/v1/files/{id}"),
        await theirs.get(f"/v1/files/{id}/content"),
        await theirs.delete(f"/v1/files/{id}"),
    ):
        fails(answer, 404, param="id")
    assert (await theirs.get("/v1/files")).json()["data"] == []
    fails(await theirs.get("/v1/files", params={"after": id, "order": "asc"}), 400, "invalid_value", "after")
    assert len((await mine.get("/v1/files")).json()["data"]) == 1
    admin = await api.holder(tenant="b")
    assert len((await admin.get("/v1/files", params={"tenant": "a"})).json()["data"]) == 1
    fails(await admin.get("/v1/files", params={"tenant": "*"}), 400)


async def test_every_answer_has_an_id_of_its_own(api: Api) -> None:
    http = await api.client()
    ids = {(await http.get(path)).headers["x-request-id"] for path in ("/v1/files", "/v1/files/x", "/healthz")}
    assert len(ids) == 3
    assert all(id.startswith("req_") for id in ids)
