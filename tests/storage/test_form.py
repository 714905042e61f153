"""Forms: parts in any order and any cut of the bytes, limits while it streams, and only our errors."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import InvalidInput, TooLarge
from batchwright.storage import Field, File, FormLimits, form

TYPE = 'multipart/form-data; boundary="the-edge"'


async def pieces(data: bytes, cuts=()):
    places = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(places):
        yield data[start:end]


async def parse(data: bytes, cuts=(), content_type: str = TYPE, limits: FormLimits | None = None) -> list:
    found = []
    async for part in form(pieces(data, cuts), content_type, limits):
        match part:
            case Field():
                found.append((part.name, part.value))
            case File():
                body = b"".join([chunk async for chunk in part.chunks])
                found.append((part.name, part.filename, part.content_type, body))
    return found


def part(disposition: str, value: bytes, *headers: str) -> bytes:
    lines = [f"Content-Disposition: form-data; {disposition}", *headers]
    return b"--the-edge\r\n" + "\r\n".join(lines).encode() + b"\r\n\r\n" + value + b"\r\n"


END = b"--the-edge--\r\n"
PURPOSE = part('name="purpose"', b"batch")
LINES = b'{"custom_id": "1"}\r\n\r\n--the-edg\r\n--the-edge-\r\n\x00\xff--the-edge--\n'
UPLOAD = part('name="file"; filename="in.jsonl"', LINES, "Content-Type: application/jsonl")
FILE = ("file", "in.jsonl", "application/jsonl", LINES)


@pytest.mark.parametrize("order", [PURPOSE + UPLOAD, UPLOAD + PURPOSE])
async def test_the_file_may_come_first_or_last(order):
    found = await parse(order + END)
    assert sorted(found) == [FILE, ("purpose", "batch")]
    assert (found[0] == FILE) == order.startswith(UPLOAD)


@pytest.mark.parametrize("order", [PURPOSE + UPLOAD + END, UPLOAD + PURPOSE + END + b"epilogue"])
async def test_every_cut_of_the_bytes_gives_the_same(order):
    expected = await parse(order)
    for size in range(1, len(order)):
        assert await parse(order, range(size, len(order), size)) == expected


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--the-edge", b"\r\n--the-edge", b"x", b"\x00"])),
        ),
        max_size=5,
    ),
    data=st.data(),
)
async def test_any_contents_survive_any_cut(parts, data):
    expected, body = [], b""
    for n, (is_file, tokens) in enumerate(parts):
        value = b"".join(tokens)
        if any(mark in b"\r\n" + value + b"\r\n" for mark in (b"\r\n--the-edge\r\n", b"\r\n--the-edge--")):
            value = b"would end the part"
        if is_file:
            body += part(f'name="{n}"; filename="f"', value)
            expected.append((str(n), "f", None, value))
        else:
            body += part(f'name="{n}"', value)
            expected.append((str(n), value.decode()))
    body += END
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    assert await parse(body, cuts) == expected


PLAUSIBLE = [
    PURPOSE,
    UPLOAD,
    END,
    b"--the-edge",
    b"\r\n",
    b"--",
    b":",
    b"Content-Disposition: form-data; name=",
    b'"',
    b";",
]
DAMAGE = st.one_of(
    st.sampled_from(PLAUSIBLE), st.binary(max_size=6), st.sampled_from([b"filename*=utf-8''%", b"name*0*="])
)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(DAMAGE, max_size=10), data=st.data())
async def test_any_bytes_are_read_or_refused_however_they_are_cut(tokens, data):
    async def outcome(body, cuts):
        try:
            return await parse(body, cuts)
        except InvalidInput as error:
            return type(error)

    body = b"".join(tokens)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=6))
    assert await outcome(body, cuts) == await outcome(body, ())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends before its last boundary"),
        (b"\r\n\r\n", "ends before its last boundary"),
        (PURPOSE, "ends before its last boundary"),
        (PURPOSE + UPLOAD[:-20], "ends before its last boundary"),
        (b'{"purpose": "batch"}', "does not begin with the boundary"),
        (b"\r\npreamble\r\n" + PURPOSE + END, "does not begin with the boundary"),
        (b"--the-edgeX\r\n", "the form cannot be read"),
        (part("nome=x", b"x") + END, "a part has no name"),
        (part('name=""', b"x") + END, "a part has no name"),
        (b"--the-edge\r\n\r\nx\r\n" + END, "a part has no name"),
        (b"--the-edge\r\nA: b\r\n\r\nx\r\n" + END, "a part has no name"),
        (PURPOSE.replace(b"form-data", b"attachment") + END, "a part has no name"),
        (PURPOSE + PURPOSE + END, "the field 'purpose' twice"),
        (UPLOAD + UPLOAD + END, "the field 'file' twice"),
        (part('name="a"', b"\xff") + END, "the field 'a' is not UTF-8"),
        (part('name="a"', b"x", "Content-Transfer-Encoding: base64") + END, "Content-Transfer-Encoding"),
        (part('name="file"; filename="a\x07"', b"x") + END, "cannot be printed"),
    ],
)
async def test_an_unreadable_form_is_refused_with_the_reason(body, message):
    with pytest.raises(InvalidInput, match=message):
        await parse(body)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
        f"multipart/form-data; boundary={'x' * 71}",
        "multipart/form-data; boundary=ä",
    ],
)
async def test_a_form_without_a_usable_boundary_is_refused(content_type):
    with pytest.raises(InvalidInput, match="boundary"):
        await parse(PURPOSE + END, content_type=content_type)


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data; boundary=the-edge", "Multipart/Form-Data; Boundary=the-edge; a=b"]
)
async def test_the_boundary_may_be_written_plainly(content_type):
    assert await parse(PURPOSE + END, content_type=content_type) == [("purpose", "batch")]


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        ('name="file"; filename="a b;c.jsonl"', "a b;c.jsonl"),
        ('name="file"; filename="a\\"b.jsonl"', 'a"b.jsonl'),
        ("name=file; filename=plain.jsonl", "plain.jsonl"),
        ('name="file"; filename="ä.jsonl"', "ä.jsonl"),
        ('name="file"; filename="a.jsonl"; filename*=UTF-8\'\'%C3%A4.jsonl', "ä.jsonl"),
        ("name=\"file\"; filename*=utf-8'de'%E2%82%AC.jsonl", "€.jsonl"),
        ('name="file"; filename=""', None),
        ('name="file"', None),
        ('filename="x"; NAME="file"', "x"),
    ],
)
async def test_file_names_are_read_in_every_spelling(disposition, filename):
    assert await parse(part(disposition, b"x") + END) == [("file", filename, None, b"x")]


async def test_an_empty_file_and_an_empty_form_are_read():
    assert await parse(part('name="file"; filename="a"', b"") + END) == [("file", "a", None, b"")]
    assert await parse(END) == []


async def test_nested_fields_keep_their_brackets_and_lists_may_repeat():
    body = part('name="expires_after[anchor]"', b"created_at") + part('name="expires_after[seconds]"', b"3600")
    body += part('name="a[]"', b"1") + part('name="a[]"', b"2")
    pairs = [("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "3600"), ("a[]", "1"), ("a[]", "2")]
    assert await parse(body + END) == pairs


async def test_a_file_that_nobody_reads_is_skipped():
    found = [part.name async for part in form(pieces(UPLOAD + PURPOSE + END, range(5, 100, 7)), TYPE)]
    assert found == ["file", "purpose"]


@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        (PURPOSE + UPLOAD + END, FormLimits(parts=1), "more than 1 parts"),
        (PURPOSE + END, FormLimits(field_bytes=4), "'purpose' has more than 4 bytes"),
        (UPLOAD + END, FormLimits(file_bytes=len(LINES) - 1), f"larger than {len(LINES) - 1} bytes"),
        (
            part('name="a"', b"x", *[f"X-{n}: {'y' * 1000}" for n in range(7)]) + END,
            FormLimits(header_bytes=5000),
            "headers",
        ),
    ],
)
async def test_every_limit_is_named(body, limits, message):
    with pytest.raises(TooLarge, match=message):
        await parse(body, limits=limits)


async def test_a_file_that_is_too_large_is_refused_while_it_arrives_and_the_rest_is_never_read():
    taken = 0

    async def endless():
        nonlocal taken
        yield UPLOAD[:-2]
        for _ in range(10_000):
            taken += 1
            yield b"x" * 1_000

    parts = form(endless(), TYPE, FormLimits(file_bytes=50_000))
    file = await anext(parts)
    with pytest.raises(TooLarge):
        async for _ in file.chunks:
            pass
    assert taken <= 51


async def test_a_chunk_is_read_only_after_the_one_before_was_consumed():
    taken = []

    async def stream():
        for n, chunk in enumerate([UPLOAD[:-2], b"second", b"third", b"\r\n" + END]):
            taken.append(n)
            yield chunk

    file = await anext(form(stream(), TYPE))
    chunks = file.chunks
    assert taken == [0]
    await anext(chunks)
    async for chunk in chunks:
        if chunk == b"second":
            assert taken == [0, 1]
            break


async def test_a_form_streams_into_the_store(store):
    body = UPLOAD + PURPOSE + END
    stored = None
    async for found in form(pieces(body, range(0, len(body), 9)), TYPE):
        if isinstance(found, File):
            stored = await store.put("files/new", found.chunks, limit=len(LINES))
    assert await store.read("files/new", 0, 1_000) == LINES
    assert stored.size == len(LINES)
    with pytest.raises(TooLarge):
        async for found in form(pieces(body), TYPE):
            await store.put("files/other", found.chunks, limit=len(LINES) - 1)
    assert [found.key async for found in store.list()] == ["files/new"]
