"""Uploads over HTTP: parts that become one file, once; what is refused; and servers that die on the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchwright.batches.settings import BatchSettings
from batchwright.errors import DatabaseUnavailable
from batchwright.files import http_uploads as uploads_module
from batchwright.files.http import FORM_BYTES_MAX
from batchwright.files.uploads import PART_BYTES_MAX, Uploads
from batchwright.storage import Store
from tests.api.conftest import Api, fails, serving
from tests.files.test_http import form, objects

LIMIT = 100_000
WANTED = {"filename": "in.jsonl", "purpose": "batch", "mime_type": "application/jsonl"}


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[Api]:
    """A server with a small limit for files, and a smaller one for all other bodies."""
    async with serving(
        database_url, parts={"batches": BatchSettings(file_bytes_max=LIMIT)}, body_bytes_max=10_000
    ) as api:
        yield api


async def create(http: httpx.AsyncClient, size: int, **fields: Any) -> str:
    answer = await http.post("/v1/uploads", json={**WANTED, "bytes": size, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def send(http: httpx.AsyncClient, upload: str, data: bytes) -> httpx.Response:
    return await http.post(f"/v1/uploads/{upload}/parts", files={"data": ("part", data)})


async def add(http: httpx.AsyncClient, upload: str, data: bytes) -> str:
    answer = await send(http, upload, data)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def complete(http: httpx.AsyncClient, upload: str, parts: list[str], **fields: Any) -> httpx.Response:
    return await http.post(f"/v1/uploads/{upload}/complete", json={"part_ids": parts, **fields})


async def files(http: httpx.AsyncClient) -> list[str]:
    return [one["id"] for one in (await http.get("/v1/files")).json()["data"]]


async def content(http: httpx.AsyncClient, file: str) -> bytes:
    return (await http.get(f"/v1/files/{file}/content")).content


async def test_parts_that_came_in_any_order_become_the_file_that_was_announced(api: Api) -> None:
    http = await api.client()
    pieces = [bytes([n]) * 20_000 for n in range(4)]  # more than the limit of other bodies
    created = (await http.post("/v1/uploads", json={**WANTED, "bytes": 80_000, "filename": "a/b\\in.jsonl"})).json()
    assert created == {
        "id": created["id"],
        "object": "upload",
        "bytes": 80_000,
        "created_at": created["created_at"],
        "expires_at": created["created_at"] + 3600,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "pending",
        "file": None,
    }
    part = (await send(http, created["id"], pieces[3])).json()
    assert part == {
        "id": part["id"],
        "object": "upload.part",
        "created_at": part["created_at"],
        "upload_id": created["id"],
    }
    others = await asyncio.gather(*(add(http, created["id"], piece) for piece in pieces[:3]))
    assert await files(http) == []
    md5 = hashlib.md5(b"".join(pieces)).hexdigest().upper()
    done = (await complete(http, created["id"], [*others, part["id"]], md5=md5)).json()
    file = done["file"]
    assert done == {**created, "status": "completed", "file": file}
    assert (await http.get(f"/v1/files/{file['id']}")).json() == file
    assert (file["bytes"], file["filename"], file["purpose"]) == (80_000, "in.jsonl", "batch")
    assert file["expires_at"] == file["created_at"] + 30 * 24 * 3600
    assert await content(http, file["id"]) == b"".join(pieces)
    kept = {"expires_after": {"anchor": "created_at", "seconds": 3600}, "purpose": "user_data"}
    empty = (await complete(http, await create(http, 0, **kept), [])).json()["file"]
    assert (empty["bytes"], empty["expires_at"] - empty["created_at"]) == (0, 3600)


async def test_an_upload_is_completed_once_however_often_that_is_requested(api: Api) -> None:
    http = await api.client()
    id = await create(http, 6)
    first, second = await add(http, id, b"abc"), await add(http, id, b"def")
    answers = await asyncio.gather(*(complete(http, id, [first, second]) for _ in range(6)))
    assert {answer.status_code for answer in answers} == {200}
    (file,) = {answer.json()["file"]["id"] for answer in answers}
    assert await files(http) == [file]
    assert [one for one in await objects(api) if one.startswith("files/")] == [f"files/{file[-2:]}/{file}"]
    assert await content(http, file) == b"abcdef"
    await http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert (await complete(http, id, [first, second])).json() == answers[0].json()
    fails(await complete(http, id, [second, first]), 409, "conflict")
    assert "'completed'" in fails(await http.post(f"/v1/uploads/{id}/cancel"), 409)
    assert "'completed'" in fails(await send(http, id, b"x"), 409)
    await http.delete(f"/v1/files/{file}")
    assert fails(await complete(http, id, [first, second]), 404) == f"No such File object: {file}"


async def test_parts_that_do_not_match_the_announced_file_are_refused_and_the_upload_stays_open(api: Api) -> None:
    http = await api.client()
    id, other = await create(http, 6), await create(http, 3)
    first, second, foreign = await add(http, id, b"abc"), await add(http, id, b"def"), await add(http, other, b"abc")
    for parts, words in (
        ([first], "The parts have 3 bytes, but the upload was created for 6 bytes."),
        ([], "The parts have 0 bytes"),
        ([first, first], "twice"),
        ([first, foreign], foreign),
        ([first, "part_unknown"], "part_unknown"),
    ):
        assert words in fails(await complete(http, id, parts), 400, "invalid_value", "part_ids")
    for md5 in ("0" * 32, "nonsense"):
        assert md5 in fails(await complete(http, id, [first, second], md5=md5), 400, "invalid_value", "md5")
    fails(await http.post(f"/v1/uploads/{id}/complete", json={}), 400, "missing_required_parameter", "part_ids")
    assert (await files(http), len(await objects(api))) == ([], 3)
    assert (await complete(http, id, [second, first])).json()["status"] == "completed"


async def test_a_cancelled_or_expired_upload_takes_nothing_more(api: Api) -> None:
    http = await api.client()
    late, stopped = await create(http, 3), await create(http, 3)
    parts = {id: await add(http, id, b"abc") for id in (late, stopped)}
    await api.sql("UPDATE batchwright.upload SET expires_at = now() WHERE id = %(id)s", id=late)
    fails(await http.post(f"/v1/uploads/{late}/cancel"), 409)
    for _ in range(2):
        assert (await http.post(f"/v1/uploads/{stopped}/cancel")).json()["status"] == "cancelled"
    for id, status in ((late, "expired"), (stopped, "cancelled")):
        answers = [await send(http, id, b"x"), await complete(http, id, [parts[id]])]
        for answer in answers:
            assert f"an upload with status '{status}'." in fails(answer, 409, "conflict")
            assert answer.headers["x-should-retry"] == "false"
    assert (await files(http), len(await objects(api))) == ([], 2)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"bytes": LIMIT + 1}, None, "bytes"),
        ({"bytes": -1}, "integer_below_min_value", "bytes"),
        ({"bytes": "5"}, "invalid_type", "bytes"),
        ({"bytes": ...}, "missing_required_parameter", "bytes"),
        ({"purpose": "batch_output"}, "invalid_value", "purpose"),
        ({"filename": ""}, "empty_string", "filename"),
        ({"filename": "x" * 513}, "string_above_max_length", "filename"),
        ({"filename": "a\nb"}, "invalid_value", "filename"),
        ({"mime_type": ...}, "missing_required_parameter", "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "integer_below_min_value", None),
        ({"colour": "red"}, "unknown_parameter", "colour"),
    ],
)
async def test_an_upload_has_the_same_limits_as_a_file(
    api: Api, change: dict[str, Any], code: str | None, param: str | None
) -> None:
    body = {**WANTED, "bytes": 5, **change}
    body = {name: value for name, value in body.items() if value is not ...}
    answer = await (await api.client()).post("/v1/uploads", json=body)
    message = fails(answer, 400, code, param)
    if code is None:
        assert message == f"File is too large. The limit of this server is {LIMIT} bytes (batches.file_bytes_max)."
    assert await api.sql("SELECT FROM batchwright.upload") == []


async def test_forms_that_are_not_a_part_leave_nothing_behind(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    http = await api.client()
    id = await create(http, 1000)
    path = f"/v1/uploads/{id}/parts"
    data = ('name="data"; filename="x"', b"abc")
    whole = form(data)
    wrong: list[tuple[dict[str, Any], str, str | None]] = [
        (form(), "missing_required_parameter", "data"),
        (form(('name="file"; filename="x"', b"abc")), "unknown_parameter", "file"),
        (form(data, ('name="purpose"', b"batch")), "unknown_parameter", "purpose"),
        (form(data, data), "invalid_request", "data"),
        ({**whole, "content": whole["content"][:-5]}, "invalid_request", None),
        ({"json": {"data": "abc"}}, "invalid_request", None),
    ]
    for request, code, param in wrong:
        fails(await http.post(path, **request), 400, code, param)
    announced = {**whole["headers"], "Content-Length": str(PART_BYTES_MAX + FORM_BYTES_MAX + 1)}
    answer = await http.post(path, content=whole["content"], headers=announced)
    assert fails(answer, 400, param="data") == "Part is too large. The limit is 67108864 bytes."
    monkeypatch.setattr(uploads_module, "PART_BYTES_MAX", 10)
    assert fails(await send(http, id, b"x" * 11), 400, param="data").startswith("Part is too large.")
    monkeypatch.undo()
    assert "twice that size" in fails(await send(http, id, b"x" * 2001), 400, "invalid_value", "data")
    assert await objects(api) == []
    for _ in range(2):
        assert (await send(http, id, b"x" * 1000)).status_code == 200
    fails(await send(http, id, b"x"), 400, "invalid_value", "data")
    assert (await http.post(path, **form(('name="data"', b"")))).status_code == 200


async def test_an_upload_belongs_to_its_tenant(api: Api) -> None:
    mine, theirs = await api.holder(tenant="a"), await api.holder(tenant="b")
    id = await create(mine, 3)
    part = await add(mine, id, b"abc")
    for answer in (
        await send(theirs, id, b"abc"),
        await complete(theirs, id, [part]),
        await theirs.post(f"/v1/uploads/{id}/cancel"),
        await theirs.post("/v1/uploads/upload_unknown/cancel"),
    ):
        assert fails(answer, 404, param="id").startswith("No such Upload object: upload_")
    own = await create(theirs, 3)
    fails(await complete(theirs, own, [part]), 400, "invalid_value", "part_ids")
    file = (await complete(mine, id, [part])).json()["file"]["id"]
    assert (await files(mine), await files(theirs)) == ([file], [])


async def test_an_upload_that_ends_while_its_parts_are_put_together_ends_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = await api.client()
    id = await create(http, 3)
    part = await add(http, id, b"abc")
    put = Store.put

    async def slow(self: Store, key: str, *args: Any, **options: Any) -> Any:
        stored = await put(self, key, *args, **options)
        assert (await http.post(f"/v1/uploads/{id}/cancel")).json()["status"] == "cancelled"
        return stored

    monkeypatch.setattr(Store, "put", slow)
    assert "'cancelled'" in fails(await complete(http, id, [part]), 409)
    assert (await files(http), await objects(api)) == ([], [f"uploads/{id}/{part}"])


async def test_a_commit_whose_answer_was_lost_makes_no_second_file(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    http = await api.client()
    id = await create(http, 6)
    for name in ("add_part", "_commit"):
        write, calls = getattr(Uploads, name), 0

        async def forgetful(*args: Any, write: Any = write, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            answer = await write(*args, **options)
            if calls % 2:
                raise DatabaseUnavailable("the answer was lost")
            return answer

        monkeypatch.setattr(Uploads, name, forgetful)
    parts = [await add(http, id, b"abc") for _ in range(2)]
    file = (await complete(http, id, parts)).json()["file"]["id"]
    assert await files(http) == [file]
    assert await content(http, file) == b"abcabc"
    assert len(await objects(api)) == 3


DEATHS = {
    "a part without a row": ("batchwright.storage.store:Store.put", "after"),
    "bytes without a row": ("batchwright.storage.store:Store.put", "after"),
    "an open transaction": ("batchwright.files.store:Files.add", "after"),
    "no answer": ("batchwright.files.uploads:Uploads._commit", "after"),
}


PARTLY = {"a part without a row"}


async def doomed(briefs: list[dict[str, Any]]) -> list[int]:
    command = [sys.executable, "-m", "tests.files.doomed", json.dumps(briefs)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
    codes: list[int] = json.loads(said)
    return codes


@pytest.mark.thorough
async def test_a_server_that_is_killed_between_two_steps_leaves_no_half_file(api: Api, database_url: str) -> None:
    """Four processes are killed, each at another step; repeating the request returns the same file."""
    http = await api.client()
    folder = Path(str(api.batchwright.store)).parent

    left: dict[str, tuple[str, list[str]]] = {}
    briefs: list[dict[str, Any]] = []
    for death, (at, when) in DEATHS.items():
        id = await create(http, 6)
        parts = [await add(http, id, piece) for piece in (b"abc", b"def")]
        left[death] = id, parts
        whole = form(('name="data"', b"xyz"))
        part = {"content": whole["content"].decode(), "headers": whole["headers"]}
        verb, request = ("parts", part) if death in PARTLY else ("complete", {"json": {"part_ids": parts}})
        path = f"/v1/uploads/{id}/{verb}"
        place = {"url": database_url, "folder": str(folder)}
        briefs.append({**place, "at": at, "when": when, "path": path, "request": request})
    assert await doomed(briefs) == [-signal.SIGKILL] * len(DEATHS)
    (done,) = await files(http)
    assert await content(http, done) == b"abcdef"
    found = set()
    for death, (id, parts) in left.items():
        file = (await complete(http, id, parts)).json()["file"]["id"]
        assert (file == done) == (death == "no answer"), death
        assert await content(http, file) == b"abcdef"
        found.add(file)
    assert sorted(await files(http)) == sorted(found)
    assert len(found) == len(DEATHS)
    # Only the objects of processes that died before their commit are left for the garbage collector.
    assert len([one for one in await objects(api) if one.startswith("files/")]) == len(DEATHS) + 2
