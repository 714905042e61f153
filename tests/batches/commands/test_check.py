"""`batchwright batch check`: a dry run on a file, without any database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchwright.batches.commands.check import estimate_text
from tests.batches.commands.cases import write
from tests.batches.stage import jsonl, request
from tests.cli.conftest import Inside

SHARED = "You are a careful translator, and you never leave out a word. " * 40


@pytest.fixture(autouse=True)
def no_database(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")


def test_a_good_file_is_counted_by_model_and_estimated(inside: Inside, tmp_path: Path) -> None:
    lines = [
        request(f"r{n}", model="large" if n == 0 else "small", prompt=f"{SHARED} {n}", max_tokens=None)
        for n in range(9)
    ]
    found = inside.json("batch", "check", str(write(tmp_path / "in.jsonl", lines)), "--output-tokens", "100")
    assert (found["requests"], found["rejected"], found["problems"]["total"]) == (9, 0, 0)
    small, large = found["models"]
    assert (small["model"], small["requests"], small["groups"]) == ("small", 8, 1)
    assert (large["model"], large["requests"], large["shared_tokens"]) == ("large", 1, 0)
    assert small["prompt_tokens"] == pytest.approx(8 * len(SHARED) / 4, rel=0.05)
    assert small["shared_tokens"] == pytest.approx(7 * len(SHARED) / 4, rel=0.15)
    assert (small["output_tokens"], found["output_tokens"]) == (800, 900)
    assert found["cost"] is None


def test_a_maximum_of_tokens_bounds_the_estimate_and_what_is_assumed_is_marked(inside: Inside, tmp_path: Path) -> None:
    lines = [
        request("a", max_tokens=7),
        request("b", max_tokens=900, max_completion_tokens=20),
        request("c", max_completion_tokens=5000),
        *[request(f"no maximum {value}", max_tokens=value) for value in (None, -1, 2**60, "7", 7.5)],
    ]
    file = str(write(tmp_path / "in.jsonl", lines))
    found = inside.json("batch", "check", file, "--output-tokens", "100")
    (model,) = found["models"]
    assert found["output_tokens"] == model["output_tokens"] == 7 + 20 + 100 + 5 * 100
    assert (model["bounded"], model["output_tokens_max"], found["output_tokens_max"]) == (3, None, None)
    assert found["assumptions"] == {"prompt_bytes_per_token": 4, "output_tokens_per_answer": 100}
    _, out, _ = inside("batch", "check", file)
    assert "assumed: 4 bytes of a prompt per token; an answer has 250 tokens (--output-tokens), or its maximum" in out
    assert "if that is less: 3 of 8 requests have one\n" in out
    write(tmp_path / "in.jsonl", lines[:3])
    found = inside.json("batch", "check", file)
    assert (found["output_tokens"], found["output_tokens_max"]) == (7 + 20 + 250, 7 + 20 + 5000)
    assert "3 of 3 requests have one, which allows 5,027 answer tokens at most" in inside("batch", "check", file)[1]


@pytest.mark.parametrize(
    ("url", "body", "output_tokens"),
    [
        ("/v1/responses", {"input": "a", "max_output_tokens": 9, "max_tokens": 3}, 9),
        ("/v1/completions", {"prompt": "a", "max_tokens": 9, "max_output_tokens": 3}, 9),
        ("/v1/embeddings", {"input": "a", "max_tokens": 3}, 0),
    ],
)
def test_each_endpoint_has_its_own_maximum(
    inside: Inside, tmp_path: Path, url: str, body: dict[str, Any], output_tokens: int
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "small", **body}}
    file = str(write(tmp_path / "in.jsonl", [line]))
    found = inside.json("batch", "check", file)
    assert (found["output_tokens"], found["output_tokens_max"]) == (output_tokens, output_tokens)
    assert found["assumptions"]["output_tokens_per_answer"] == (250 if output_tokens else None)
    assert ("an answer has" in inside("batch", "check", file)[1]) is (output_tokens > 0)


@pytest.mark.parametrize("command", ["check", "run", "submit"])
def test_an_endpoint_without_batches_is_named_once_with_those_that_have_them(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL", "http://127.0.0.1:9")
    lines = [{**request(f"r{n}"), "url": "/v1/images/generations"} for n in range(5)]
    file = write(tmp_path / "in.jsonl", lines)
    file.write_bytes(b"{oops\n" + file.read_bytes())
    code, out, err = inside("batch", command, str(file))
    assert (code, out) == (1, "")
    assert err.startswith(
        f"error: {file}: '/v1/images/generations' is not supported in batches; "
        "use one of /v1/chat/completions, /v1/completions, "
    )
    assert err.count("\n") == 1


def test_half_a_surrogate_and_too_deep_nesting_are_reported_with_their_position(inside: Inside, tmp_path: Path) -> None:
    good = jsonl([request("good")]).strip()
    half = good.replace(b"good", "grün\\\\ \\ud83d\\ude00 \\ud83d!".encode())
    deep = good[:-1] + b', "deep": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\n".join([good, half, deep]))
    code, out, _ = inside("batch", "check", str(file))
    assert code == 1
    column = half.decode().index("\\ud83d!") + 1
    assert (
        "✗ line 2: invalid_json_line: This line is not parseable as valid JSON: \\ud83d at column "
        f"{column} is half of a surrogate pair."
    ) in out
    assert re.search(
        r"✗ line 3: invalid_json_line: This line is not parseable as valid JSON: it has more than \d+ levels of "
        r"nesting at column \d+; keep it below 500\.",
        out,
    )


def test_with_prices_the_cost_is_estimated_with_a_cache_and_without(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_BATCHES_PRICES", '{"small": {"input": 1.0, "cached": 0.0, "output": 10.0}}')
    lines = [request(f"r{n}", prompt=f"{SHARED} {n}", max_tokens=None) for n in range(8)]
    file = str(write(tmp_path / "in.jsonl", lines))
    found = inside.json("batch", "check", file, "--output-tokens", "100")
    assert found["cost"] == pytest.approx((found["prompt_tokens"] + 10 * 800) / 1e6)
    assert found["cost_cached"] == pytest.approx((found["prompt_tokens"] - found["shared_tokens"] + 8000) / 1e6)
    code, out, err = inside("batch", "check", file)
    assert (code, err) == (0, "")
    assert "can be run: 8 requests to /v1/chat/completions; about " in out
    assert "if the cache saves all of that" in out


def test_if_one_model_has_no_price_no_cost_is_estimated(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_BATCHES_PRICES", '{"small": {"input": 1.0}}')
    lines = [request("a"), request("b", model="large")]
    found = inside.json("batch", "check", str(write(tmp_path / "in.jsonl", lines)))
    assert [one["cost"] is None for one in found["models"]] == [True, False]
    assert found["cost"] is None


def test_every_problem_is_named_with_its_line_and_the_exit_code_is_1(inside: Inside, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    write(file, [request("a"), request("a"), request("c", stream=True)])
    file.write_bytes(file.read_bytes() + b"\n{oops\n")
    code, out, err = inside("batch", "check", str(file))
    assert (code, err) == (1, "")
    assert "✗ line 2: duplicate_custom_id: " in out
    assert "✗ line 3: streaming_unsupported: " in out
    assert "✗ line 5: invalid_json_line: " in out
    assert "in.jsonl: 3 problems in 4 requests; the batch would be refused" in out
    code, out, _ = inside("batch", "check", str(file), "--json")
    assert code == 1
    assert '"total": 3' in out


def test_problems_beyond_the_limit_are_counted_but_not_printed(inside: Inside, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [request("same") for _ in range(8)])
    _, out, _ = inside("batch", "check", str(file), "--limit", "2")
    assert out.count("duplicate_custom_id") == 2
    assert "… and 5 more" in out
    _, out, _ = inside("batch", "check", str(write(file, [request("same") for _ in range(1_300)])), "--limit", "1200")
    assert out.count("duplicate_custom_id") == 1_200
    assert "… and 99 more" in out


def test_the_endpoint_is_that_of_the_first_request_unless_it_is_named(inside: Inside, tmp_path: Path) -> None:
    body = {"model": "small", "input": "some text"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    file = tmp_path / "in.jsonl"
    write(file, [line])
    file.write_bytes(b"\xef\xbb\xbf\n" + file.read_bytes())
    found = inside.json("batch", "check", str(file))
    assert (found["endpoint"], found["output_tokens"]) == ("/v1/embeddings", 0)
    code, out, _ = inside("batch", "check", str(file), "--endpoint", "/v1/chat/completions")
    assert code == 1
    assert "invalid_url" in out


def test_requests_of_several_endpoints_are_checked_and_estimated_each_by_its_own(
    inside: Inside, tmp_path: Path
) -> None:
    documents = ["d" * 40] * 10
    rerank = {"model": "small", "query": "q" * 398, "documents": documents}
    lines = [request("a", max_tokens=None), {"custom_id": "b", "method": "POST", "url": "/v1/rerank", "body": rerank}]
    file = write(tmp_path / "in.jsonl", lines)
    found = inside.json("batch", "check", str(file), "--output-tokens", "100")
    assert (found["endpoint"], found["problems"]["total"]) == ("mixed", 0)
    assert found["endpoints"] == {"/v1/chat/completions": 1, "/v1/rerank": 1}
    assert found["output_tokens"] == 100
    assert found["prompt_tokens"] == pytest.approx(10 * (400 + 43) / 4, rel=0.1)
    _, out, _ = inside("batch", "check", str(file))
    assert "2 requests to /v1/chat/completions (1), /v1/rerank (1); about" in out
    code, out, _ = inside("batch", "check", str(file), "--endpoint", "/v1/rerank")
    assert (code, "invalid_url" in out) == (1, True)


def test_models_without_a_gateway_are_said_to_fail(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_MODEL_GATEWAYS", '{"large": {"url": "http://127.0.0.1:1"}}')
    file = write(tmp_path / "in.jsonl", [request("a"), request("b", model="large")])
    code, out, _ = inside("batch", "check", str(file))
    assert code == 0
    assert "1 requests are for models without a gateway" in out
    assert inside.json("batch", "check", str(file))["rejected"] == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory"),
        (["."], ". cannot be read: Is a directory"),
        (
            ["in.jsonl", "--endpoint", "/v1/images"],
            "--endpoint '/v1/images' is not supported in batches; use one of /v1/chat",
        ),
    ],
)
def test_an_impossible_check_says_why(inside: Inside, tmp_path: Path, arguments: list[str], complaint: str) -> None:
    write(tmp_path / "in.jsonl")
    code, out, err = inside("batch", "check", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {complaint}")


def test_an_empty_file_is_a_problem(inside: Inside, tmp_path: Path) -> None:
    code, out, _ = inside("batch", "check", str(write(tmp_path / "in.jsonl", [])))
    assert code == 1
    assert "✗ empty_file: The input file is empty." in out


@pytest.mark.parametrize(("n", "text"), [(0, "0"), (7, "7"), (99, "99"), (1_432_972, "1,400,000"), (125, "120")])
def test_an_estimate_has_two_digits(n: int, text: str) -> None:
    assert estimate_text(n) == f"about {text}"


@pytest.mark.parametrize("command", ["check", "run", "submit"])
def test_another_format_is_named_once_and_not_once_per_line(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_GLOBAL_INFERENCE_GATEWAY_URL", "http://127.0.0.1:9")
    file = tmp_path / "in.csv"
    file.write_text("id,prompt\n" + "".join(f"{n},Say {n}\n" for n in range(1000)))
    code, out, err = inside("batch", command, str(file))
    assert (code, out) == (1, "")
    assert err == (
        f"error: {file} looks like CSV, not like JSON Lines; write one JSON object per row. "
        "`batchwright batch example` prints requests as they must be\n"
    )
