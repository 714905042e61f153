import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.batches.plan.plan import InputLimits, Rules, read, write
from batchwright.batches.plan.planfile import Entry, pack_entries, plan_path, read_entries, safe_name, write_file
from batchwright.errors import ConfigurationError
from tests.batches.plan.reference import REQUIRED, problems

CHAT = "/v1/chat/completions"


def line(custom_id="a", model="m", content="hello", **more):
    body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}).encode()


@pytest.fixture
def draft(tmp_path):
    def read_bytes(data, endpoint=CHAT, models=None, **limits):
        file = tmp_path / "input.jsonl"
        file.write_bytes(data)
        return read(file, Rules(endpoint=endpoint, limits=InputLimits(**limits), models=models))

    return read_bytes


def codes(draft):
    return [(each.line, each.code) for each in draft.problems.kept]


def test_line_numbers_count_blank_lines_and_survive_crlf_and_a_byte_order_mark(draft, tmp_path):
    lines = [line("a"), b"", b"  \t", line("b"), b"oops", line("c")]
    found = draft(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert codes(found) == [(5, "invalid_json_line")]
    assert found.line_count == 4


def test_offsets_leave_out_the_byte_order_mark_and_lengths_the_newline(draft, tmp_path):
    data = b"\xef\xbb\xbf" + line("a") + b"\n\n" + line("b")
    entries = write(draft(data), tmp_path / "plan")["m"].entries
    assert [data[each.offset :][: each.length] for each in sorted(entries)] == [line("a"), line("b")]


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_requests_is_empty(draft, data):
    found = draft(data)
    assert found.problems.as_json() == {
        "object": "list",
        "data": [
            {
                "code": "empty_file",
                "line": None,
                "message": "The input file is empty. Please ensure that the batch contains at least one request.",
                "param": None,
            }
        ],
        "total": 1,
    }


def test_a_duplicate_is_found_among_bad_lines_and_if_written_with_escapes(draft):
    data = b"\n".join([line("ab", stream=True), line("c"), line("ab").replace(b'"ab"', b'"\\u0061b"'), line("c")])
    found = draft(data)
    assert codes(found) == [(1, "streaming_unsupported"), (3, "duplicate_custom_id"), (4, "duplicate_custom_id")]
    assert found.problems.kept[1].message.startswith("The custom_id 'ab' for this request is a duplicate of another")


def test_only_the_first_problems_are_kept_but_all_are_counted(draft):
    found = draft(b"{}\n" * 700)
    assert (len(found.problems.kept), found.problems.total) == (1000, 2800)
    assert found.problems.kept[-1].line == 250


def test_one_request_too_many_is_refused_and_the_last_allowed_one_is_not(draft):
    data = b"\n".join(line(str(number)) for number in range(4))
    assert codes(draft(data, requests_max=4)) == []
    found = draft(data, requests_max=3)
    assert codes(found) == [(None, "too_many_tasks")]
    assert found.problems.kept[0].message.startswith("The batch has more than the 3 requests maximum.")


def test_endless_blank_lines_are_not_read_to_the_end(draft):
    assert codes(draft(b"\n" * 29 + line(), requests_max=3)) == []
    assert codes(draft(b"\n" * 30 + line(), requests_max=3)) == [(None, "too_many_lines")]


def test_50001_lines_are_one_too_many(draft):
    data = b"\n".join(line(str(number)) for number in range(50_001))
    assert codes(draft(data)) == [(None, "too_many_tasks")]


def test_one_byte_too_many_is_refused_before_anything_is_read(draft):
    assert codes(draft(line(), bytes_max=len(line()))) == []
    found = draft(line(), bytes_max=len(line()) - 1)
    assert codes(found) == [(None, "file_too_large")]
    assert f"larger than the {len(line()) - 1} bytes maximum" in found.problems.kept[0].message


def test_a_line_over_its_limit_is_one_problem_and_the_next_line_is_read_as_usual(draft, tmp_path):
    long, good = line("a", content="x" * 3_000_000), line("b")
    found = draft(b"\n".join([good, long, b"oops", long]), line_bytes_max=len(good))
    assert codes(found) == [(2, "line_too_long"), (3, "invalid_json_line"), (4, "line_too_long")]


def test_a_line_of_4_megabytes_is_fine(draft, tmp_path):
    data = line("a", content="x" * 4_000_000) + b"\n" + line("b")
    plan = write(draft(data), tmp_path / "plan")["m"]
    assert sorted(each.length for each in plan.entries) == [len(line("b")), len(data) - len(line("b")) - 1]
    assert plan.prompt_tokens > 1_000_000


def test_a_limit_too_large_for_a_plan_entry_is_refused():
    with pytest.raises(ConfigurationError, match="line_bytes_max is 4294967296: write a number of bytes from 1 to"):
        InputLimits(line_bytes_max=2**32)


def test_embedding_inputs_are_summed_over_all_lines(draft):
    def embed(custom_id, texts):
        body = {"model": "m", "input": texts}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}).encode()

    data = b"\n".join([embed("a", ["x"] * 30_000), embed("b", ["x"] * 20_000)])
    assert codes(draft(data, "/v1/embeddings")) == []
    found = draft(data + b"\n" + embed("c", "x"), "/v1/embeddings")
    assert codes(found) == [(None, "too_many_inputs")]
    assert "50001 embedding inputs" in found.problems.kept[0].message


def test_one_model_too_many_is_one_problem(draft):
    data = b"\n".join(line(str(number), model=f"m{number % 6}") for number in range(12))
    assert codes(draft(data, models_max=6)) == []
    assert codes(draft(data, models_max=4)) == [(5, "too_many_models")]


def test_a_line_for_a_model_without_a_gateway_is_rejected_but_not_a_problem_of_the_file(draft, tmp_path):
    lines = [line("a"), line("b", model="other"), line("c"), line("d", model="more")]
    data = b"\n".join(lines)
    found = draft(data, models=frozenset({"m"}), models_max=1)
    write(found, tmp_path / "plan")
    rejected = read_entries(tmp_path / "plan" / "rejected.plan")
    assert [data[each.offset :][: each.length] for each in rejected] == [lines[1], lines[3]]
    names = json.loads((tmp_path / "plan" / "model_map.json").read_bytes())
    assert (names["line_count"], names["rejected_count"], list(names["model_to_safe"])) == (4, 2, ["m"])


def test_the_model_map_has_both_directions_and_the_counts_of_each_plan(draft, tmp_path):
    data = b"\n".join(line(str(number), model=("org/A:1", "org.A.1")[number % 2]) for number in range(5))
    plans = write(draft(data), tmp_path)
    names = json.loads((tmp_path / "model_map.json").read_bytes())
    assert names["model_to_safe"] == {model: safe_name(model) for model in ("org/A:1", "org.A.1")}
    assert names["safe_to_model"] == {safe: model for model, safe in names["model_to_safe"].items()}
    assert names["line_count"] == 5
    assert names["models"]["org/A:1"]["requests"] == 3
    for model, plan in plans.items():
        assert read_entries(plan_path(tmp_path, names["model_to_safe"][model])) == plan.entries


def test_safe_names_are_valid_file_names_and_different_for_different_models():
    assert safe_name("org/model-A:1").startswith("org_model_A_1-")
    assert safe_name("a/b") != safe_name("a:b")
    assert "/" not in safe_name("../../etc")
    assert len(safe_name("m" * 176).encode()) < 120


def test_a_shard_reads_its_slice_of_a_plan(tmp_path):
    entries = [Entry(number, 1, 2**32 - 1) for number in range(10)]
    write_file(tmp_path / "a.plan", pack_entries(entries))
    assert (tmp_path / "a.plan").stat().st_size == 160
    assert read_entries(tmp_path / "a.plan", 3, 4) == entries[3:7]


def test_prompt_tokens_and_shared_tokens_are_estimated(draft, tmp_path):
    data = b"\n".join(line(str(number), content="x" * 4096 + str(number)) for number in range(3))
    plan = write(draft(data), tmp_path)["m"]
    assert (
        plan.prompt_tokens
        == sum(len(json.dumps(json.loads(each)["body"]["messages"])) for each in data.split(b"\n")) // 4
    )
    assert plan.shared_tokens == 2 * 16 * 64
    assert (plan.groups, [each.group for each in plan.entries]) == (1, [1, 1, 1])


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


CRASH = """
import os, signal, sys
from pathlib import Path
from batchwright.batches.plan import plan
from batchwright.batches.plan import planfile
calls = int(sys.argv[3])
def fsync(descriptor, real=os.fsync):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = fsync
plan.write(plan.read(Path(sys.argv[1]), plan.Rules(endpoint="/v1/chat/completions")), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_planner_killed_while_writing_leaves_no_model_map_and_planning_again_gives_the_same_bytes(tmp_path, calls):
    file = tmp_path / "input.jsonl"
    file.write_bytes(b"\n".join(line(str(number), model=f"m{number % 2}") for number in range(100)))
    rules = Rules(endpoint=CHAT)
    write(read(file, rules), tmp_path / "whole")
    whole = files(tmp_path / "whole")
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", CRASH, str(file), str(folder), str(calls)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    left = files(folder)
    assert "model_map.json" not in left
    assert sum(name.endswith(".tmp") for name in left) == 1
    assert all(whole[name] == data for name, data in left.items() if not name.endswith(".tmp"))
    write(read(file, rules), folder)
    assert files(folder) == whole


# A few characters of each relevant kind: hypothesis takes seconds to list all of Unicode on a fresh machine.
_text = functools.partial(st.text, alphabet='a"\\/{ \t\x00\x1f\x7féß€\ufeff\u2028😀')
ids = st.one_of(_text(max_size=3), st.integers(0, 3).map(str), st.none(), st.integers(), st.just("x" * 600))
values = st.one_of(st.none(), st.booleans(), st.integers(), _text(max_size=5), st.lists(_text(max_size=3), max_size=2))
bodies = st.fixed_dictionaries(
    {},
    optional={
        "model": st.one_of(st.sampled_from(["m", "n", "m" * 177, "n\0"]), values),
        "messages": values,
        "input": values,
        "prompt": values,
        "stream": values,
        "max_tokens": st.integers(),
    },
)
good_bodies = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["m", "n", "o/p"]),
        "messages": st.lists(_text(max_size=5), max_size=2),
        "input": _text(max_size=5),
        "prompt": st.sampled_from(["", "x" * 2000, "x" * 3000, "y"]),
    }
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": ids,
        "method": st.one_of(st.just("POST"), values),
        "url": st.one_of(st.sampled_from(sorted(REQUIRED)), values),
        "body": st.one_of(good_bodies, bodies, values),
    },
)
lines = st.one_of(
    requests.map(lambda request: json.dumps(request).encode()),
    requests.map(lambda request: json.dumps(request, ensure_ascii=False).encode()),
    st.sampled_from([b"", b" ", b"\r", b"{", b"[]", b"null", b'"\xff"', b"{}", b'{"custom_id": "\\ud800"}']),
    st.binary(max_size=8).filter(lambda data: b"\n" not in data and b"\xef" not in data and not data.isspace()),
)


@given(st.lists(lines, max_size=8), st.sampled_from(sorted(REQUIRED)), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_the_fast_check_finds_the_same_problems_as_a_slow_one(tmp_path_factory, found, endpoint, end, last):
    data = end.join(found) + end * last
    file = tmp_path_factory.getbasetemp() / "checked.jsonl"
    file.write_bytes(data)
    draft = read(file, Rules(endpoint=endpoint))
    ours = [(each.line, each.code, each.param, each.message) for each in draft.problems.kept]
    expected = problems(data, endpoint)
    assert [each for each in ours if each[0] is not None] == expected
    assert ("empty_file" in [each[1] for each in ours]) == all(each.strip() == b"" for each in data.split(b"\n"))


@given(st.lists(good_bodies, max_size=20), st.lists(st.booleans(), min_size=20, max_size=20), st.booleans())
def test_a_plan_holds_every_line_exactly_once(tmp_path_factory, bodies, blanks, mark):
    written = []
    for number, body in enumerate(bodies):
        request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        written += [json.dumps(request, ensure_ascii=False).encode(), *[b""] * blanks[number]]
    data = b"\xef\xbb\xbf" * mark + b"\n".join(written)
    folder = tmp_path_factory.getbasetemp() / "planned"
    folder.mkdir(exist_ok=True)
    (folder / "input.jsonl").write_bytes(data)
    draft = read(folder / "input.jsonl", Rules(endpoint="/v1/completions"))
    found = []
    for model in draft.models:
        planned = [data[each.offset :][: each.length] for each in draft.plan(model).entries]
        assert {json.loads(each)["body"]["model"] for each in planned} <= {model}
        found += planned
    assert sorted(found) == sorted(each for each in written if each)
    assert draft.line_count == len(bodies)


def test_the_memory_for_reading_a_long_file_grows_only_with_its_plan(tmp_path):
    code = (
        "import resource, sys; from pathlib import Path; from batchwright.batches.plan import plan;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); plan.read(Path(sys.argv[1]), plan.Rules(endpoint=sys.argv[2])); print(peak() - before)"
    )
    file = tmp_path / "input.jsonl"
    with file.open("wb") as target:
        for number in range(8_000):
            target.write(line(str(number), content="x" * 6000) + b"\n")
    command = [sys.executable, "-c", code, str(file), CHAT]
    grown = int(subprocess.run(command, check=True, capture_output=True, timeout=60, env=dict(os.environ)).stdout)
    assert Path(file).stat().st_size > 48_000_000
    assert grown < 15_000  # kilobytes
