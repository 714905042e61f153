"""Lines of batches: how requests are packed, and how their answers are read."""

from __future__ import annotations

from decimal import Decimal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.inference.embeddings import RemoteEmbedder
from batchwright.ingest.entities.model import ModelExtractor
from batchwright.ingest.lines import (
    FAILURES_MAX,
    EmbeddingAsk,
    EntityAsk,
    Sent,
    Unsent,
    line_bytes,
    numbered,
    pack,
    read_line,
    settle_line,
    share_money,
    unanswered,
)
from tests.ingest.fake_provider import vector_of

EMBED = EmbeddingAsk(RemoteEmbedder(None, "embedder"))
NAME = EntityAsk(ModelExtractor(None, "namer"))


def unsent(number: int, *, tokens: int = 10, size: int = 30, pack: int | None = None, left_out: str = "") -> Unsent:
    return Unsent(number.to_bytes(4), tokens, size, pack, left_out)


def sent(count: int, **values) -> list[Sent]:
    row = {"line": 3, "item_id": "item", "tokens": 5, "failures": 0, "left_out": "", **values}
    return [Sent(hash=bytes([n]), input=f"text {n}", **row) for n in range(count)]


def answered(status: int, body: object) -> bytes:
    response = {"status_code": status, "request_id": "r", "body": body}
    return orjson.dumps({"id": "x", "custom_id": "line-3", "response": response, "error": None})


def refusal(**error) -> bytes:
    return answered(400, {"error": {"message": "no", "type": "invalid_request_error", **error}})


@given(
    st.lists(st.tuples(st.integers(1, 60_000), st.integers(0, 5_000), st.sampled_from([None, 1, 10])), max_size=300),
    st.integers(10_000, 400_000),
)
def test_lines_contain_the_first_requests_in_order_and_within_the_limits(rows, bytes_max):
    wanted = [unsent(n, tokens=tokens, size=size, pack=p) for n, (tokens, size, p) in enumerate(rows)]
    lines = pack(wanted, 100, bytes_max)
    placed = [row for line in lines for row in line]
    assert placed == wanted[: len(placed)]
    assert bool(placed) == bool(wanted)
    for line in lines:
        assert len(line) <= min(100, line[0].pack or 100)
        assert len({row.pack for row in line}) == 1
        assert len(line) == 1 or sum(row.tokens for row in line) <= 100_000
    assert len(lines) <= 1 or sum(2 * row.bytes for row in placed) <= bytes_max
    assert [(line, place) for _, line, place in numbered(lines)] == [
        (n, place) for n, line in enumerate(lines) for place in range(len(line))
    ]


@given(st.decimals(0, 100, places=9), st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_shares_of_money_add_up_to_all_of_it(cost, weights):
    parts = share_money(cost, weights)
    assert sum(parts) == cost
    assert min(parts) >= 0


def test_the_same_rows_give_the_same_bytes_and_one_line():
    text = 'quotes " and\nbreaks \u2028 here'
    first = line_bytes(EMBED, 7, [text, "b"], "")
    assert first == line_bytes(EMBED, 7, [text, "b"], "")
    assert len(first.decode().splitlines()) == 1
    line = orjson.loads(first)
    assert (line["custom_id"], line["url"]) == ("line-7", "/v1/embeddings")
    assert line["body"] == {"model": "embedder", "input": [text, "b"], "encoding_format": "base64"}
    assert "encoding_format" not in orjson.loads(line_bytes(EMBED, 7, ["b"], "encoding_format"))["body"]


def test_answers_are_assigned_to_their_texts():
    data = [{"index": n, "embedding": vector_of(f"text {n}").tolist()} for n in (1, 0)]
    number, answer = read_line(answered(200, {"data": data, "usage": {"prompt_tokens": 9, "total_tokens": 9}}))
    settled = settle_line(EmbeddingAsk(RemoteEmbedder(None, "e")), sent(2), answer)
    assert number == 3
    assert (sorted(settled.values), settled.back, settled.usage.input) == ([b"\0", b"\1"], [], 9)
    assert settled.is_paid
    assert settled.error is None


def test_a_vector_without_a_direction_is_an_error_of_its_text_alone():
    data = [{"index": 0, "embedding": [0.0, 0.0]}, {"index": 1, "embedding": [1.0, 0.0]}]
    _, answer = read_line(answered(200, {"data": data, "usage": {"prompt_tokens": 9}}))
    settled = settle_line(EmbeddingAsk(RemoteEmbedder(None, "e")), sent(2), answer)
    assert list(settled.values) == [b"\1"]
    assert [(back.hash, back.error["code"]) for back in settled.back] == [(b"\0", "invalid_vector")]


def test_a_refused_line_is_split_until_the_bad_text_is_alone():
    _, answer = read_line(refusal(param="input"))
    packs = []
    for count in (100, 10, 2):
        settled = settle_line(EMBED, sent(count), answer)
        assert all(back.error is None and back.failures == 0 for back in settled.back)
        packs.append({back.pack for back in settled.back})
    assert packs == [{10}, {1}, {1}]
    (alone,) = settle_line(EMBED, sent(1), answer).back
    assert alone.error["kind"] == "SchemaInvalid"


def test_a_line_that_is_refused_for_another_field_fails_no_text():
    _, answer = read_line(refusal(param="dimensions"))
    assert {back.error["kind"] for back in settle_line(EMBED, sent(5), answer).back} == {"SchemaInvalid"}


def test_an_optional_field_that_is_refused_is_left_out():
    _, answer = read_line(refusal(param="temperature"))
    settled = settle_line(NAME, sent(1), answer)
    assert settled.refused_field == "temperature"
    assert [(back.left_out, back.error) for back in settled.back] == [("temperature", None)]
    (again,) = settle_line(NAME, sent(1, left_out="temperature"), answer).back
    assert again.error is not None


@pytest.mark.parametrize("code", ["batch_expired", "batch_cancelled", "batch_failed", "request_aborted", "no_answer"])
def test_a_line_without_an_answer_is_resent_a_few_times(code):
    settled = settle_line(EMBED, sent(2), unanswered(code))
    assert [(back.failures, back.error) for back in settled.back] == [(1, None)] * 2
    assert not settled.is_answered
    last = settle_line(EMBED, sent(2, failures=FAILURES_MAX - 1), unanswered(code))
    assert {(back.error["kind"], back.error["code"]) for back in last.back} == {("Transient", code)}


@pytest.mark.parametrize("line", [answered(401, {"error": {"code": "invalid_api_key"}}), None])
def test_a_refused_credential_fails_no_text(line):
    answer = unanswered("model_not_found") if line is None else read_line(line)[1]
    settled = settle_line(EMBED, sent(2), answer)
    assert "correct the key" in settled.credential
    assert [(back.failures, back.error) for back in settled.back] == [(0, None)] * 2


def test_an_answer_of_the_wrong_shape_is_paid_but_unusable():
    choices = [{"message": {"content": "no JSON"}, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    _, answer = read_line(answered(200, {"choices": choices, "usage": usage}))
    settled = settle_line(NAME, sent(1), answer)
    assert settled.is_paid
    assert (settled.usage.input, settled.usage.output) == (9, 2)
    assert [back.error["code"] for back in settled.back] == ["invalid_output"]


def test_a_price_is_shared_by_tokens():
    assert share_money(Decimal("0.9"), [1, 2, 0]) == [Decimal("0.3"), Decimal("0.6"), Decimal(0)]
