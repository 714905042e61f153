"""Files that are not requests are recognized, and the error says what to do."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from pathlib import Path

import orjson
import pytest

from batchwright.batches.plan.formats import explain_format
from tests.batches.stage import jsonl, request

CSV = b"id,prompt\n1,Say one\n2,Say two\n"
GOOD = jsonl([request(f"r{n}") for n in range(3)])
REQUESTS = [request(f"r{n}") for n in range(3)]


def packed(*names: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return target.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CSV, "looks like CSV, not like JSON Lines; write one JSON object per row. `batchwright batch example` prints"),
        (b'"id";"prompt"\n1;"Say; one"\n', "looks like CSV, "),
        (b"\xef\xbb\xbfid\tprompt\r\n1\tSay one\r\n", "looks like TSV, "),
        (b"Dear all,\n\nplease translate this letter, which has commas in it. Thank you.\n", "looks like plain text, "),
        (b"one prompt\nanother prompt\n", "looks like plain text, "),
        (b"<!doctype html>\n<html>\n", "looks like HTML or XML, "),
        (orjson.dumps(REQUESTS), "is one JSON array; write each of its elements on a line of its own: jq -c '.[]' "),
        (orjson.dumps(REQUESTS, option=orjson.OPT_INDENT_2), "is one JSON array; "),
        (orjson.dumps(REQUESTS[0], option=orjson.OPT_INDENT_2), "has JSON objects that span several lines; "),
        (str(REQUESTS[0]).encode() + b"\n", "has Python objects in its lines, not JSON: write them with json.dumps"),
        (gzip.compress(GOOD), "is compressed with gzip; unpack it first: gunzip -c "),
        (packed("[Content_Types].xml", "xl/workbook.xml"), "is an Excel file "),
        (packed("requests.jsonl"), "is a zip archive; unpack it first: unzip "),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500), "is an Excel file "),
        (GOOD.decode().encode("utf-16"), "is UTF-16, and requests must be UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        (GOOD.decode().encode("utf-16-le"), "is UTF-16, "),
        (GOOD.decode().encode("utf-32"), "is UTF-32, "),
        (b"\x7fELF\x02\x00\x01", "is a binary file; "),
        (jsonl([{"messages": [{"role": "user", "content": "a"}]}]), "looks like a file of chats, as for fine-tuning: "),
        (jsonl([{"role": "user", "content": "a"}]), "looks like a file of chats, "),
        (jsonl([{"prompt": "a{b}", "completion": "b"}]), "is JSON Lines, but not of requests: its lines have compl"),
        (b"{}\n{}\n", "is JSON Lines, but not of requests: its lines are empty, "),
        (jsonl([{"custom_id": "a", "params": {"model": "m"}}]), "has requests in Anthropic's form (params); "),
        (jsonl([{"id": "x", "custom_id": "a", "response": {}, "error": None}]), "has the answers of a batch, "),
    ],
)  # fmt: skip
def test_another_format_is_named_once_with_what_to_do(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    found = explain_format(file)
    assert found is not None
    assert found.startswith(f"{file} {words}")
    assert "\n" not in found
    assert re.search(r"[{}]file|[{}]example", found) is None


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        b"",
        b"\n\n",
        b"\xef\xbb\xbf\r\n" + GOOD,
        b"{oops\n" + GOOD,
        b"id,prompt\n" + GOOD,
        b"{oops\n{oops\n",
        jsonl([{"custom_id": "a"}]),
        b"[1]\n[2]\n",
        b"1\n2\n",
        jsonl([request("long", prompt="x" * 200_000)]),
        b"[" * 5000 + b"]" * 5000 + b"\n" + GOOD,
    ],
)
def test_a_file_that_may_be_requests_is_left_to_the_check_of_lines(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    assert explain_format(file) is None
