"""Every fault as seen on a plain socket, and which requests a rule hits."""

import asyncio
import json

import pytest

from batchwright.errors import InvalidInput
from batchwright.simulator import running
from batchwright.simulator.faults import KINDS, Faults, parse
from tests.simulator.wire import ask, chat, until, wire

pytestmark = pytest.mark.timeout(30)


async def whole(url, body):
    """Every byte until the connection ends."""
    async with wire(url) as connection:
        status, headers, raw = await connection.ask(body, connection="close")
        assert await connection.rest() == b""
        return status, headers, raw


@pytest.mark.parametrize("status", [400, 404, 408, 429, 500, 502, 503, 504, 529])
async def test_a_status_is_answered_with_an_error_in_openais_format(status):
    async with running(faults=[f"{status}:code=because"]) as simulator:
        found, headers, body = await ask(simulator.url, chat())
        assert (found, body["error"]["code"]) == (status, "because")
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert headers.get("retry-after") == ("1" if status == 429 else None)
        assert simulator.stats()["models"] == {}  # no work was done


async def test_retry_after_has_the_given_value():
    async with running(faults=["503:retry_after=2.5"]) as simulator:
        assert (await ask(simulator.url, chat()))[1]["retry-after"] == "2.5"


async def test_a_dropped_connection_sends_no_bytes():
    async with running(faults=["drop"]) as simulator, wire(simulator.url) as connection:
        with pytest.raises(asyncio.IncompleteReadError) as error:
            await connection.ask(chat())
        assert error.value.partial == b""
        assert simulator.stats()["answered"] == {"0": 1}


async def test_a_connection_can_be_dropped_after_some_bytes():
    async with running(faults=["drop:after=40"]) as simulator, wire(simulator.url) as connection:
        connection.writer.write(b"")
        with pytest.raises(asyncio.IncompleteReadError) as error:
            await connection.ask(chat())
        assert len(error.value.partial) == 40
        assert error.value.partial.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_reset_is_an_error_of_the_socket():
    async with running(faults=["reset"]) as simulator, wire(simulator.url) as connection:
        with pytest.raises(ConnectionResetError):
            await connection.ask(chat())


@pytest.mark.parametrize(("fault", "kept"), [("truncate", None), ("truncate:bytes=10", 10), ("truncate:bytes=0", 0)])
async def test_a_truncated_body_is_shorter_than_its_length(fault, kept):
    async with running(faults=[fault]) as simulator, wire(simulator.url) as connection:
        with pytest.raises(asyncio.IncompleteReadError) as error:
            await connection.ask(chat())
        promised = error.value.expected
        assert len(error.value.partial) == (promised // 2 if kept is None else kept)


async def test_a_wrong_length_is_smaller_than_the_body():
    async with running(faults=["wrong_length:by=-7"]) as simulator, wire(simulator.url) as connection:
        _, _, body = await connection.ask(chat())
        rest = await connection.rest()
        assert len(rest) == 7
        json.loads(body + rest)


async def test_a_length_that_is_too_great_leaves_the_client_waiting():
    async with running(faults=["wrong_length:by=5"]) as simulator, wire(simulator.url) as connection:
        reading = asyncio.create_task(connection.ask(chat()))
        await until(lambda: simulator.stats()["answered"] == {"200": 1})
        await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()


async def test_a_body_can_be_sent_slowly():
    async with running(faults=["drip:bytes=100:every=0.001"]) as simulator:
        status, headers, body = await ask(simulator.url, chat(max_tokens=100))
        assert (status, body["usage"]["completion_tokens"]) == (200, 100)
        assert int(headers["content-length"]) > 400


async def test_a_slow_answer_is_late_and_a_hanging_one_never_comes():
    async with running(faults=["slow:match=later:seconds=0.05", "hang:match=never"]) as simulator:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await ask(simulator.url, chat("later")))[0] == 200
        assert loop.time() - began >= 0.045
        async with wire(simulator.url) as connection:
            asking = asyncio.create_task(connection.ask(chat("never")))
            await until(lambda: simulator.stats()["in_flight"] == 1)
            asking.cancel()
        await until(lambda: simulator.stats()["aborted"]["total"] == 1)
        assert simulator.stats()["aborted"] == {"total": 1, "held": 1}


async def test_a_hanging_answer_can_have_an_end():
    async with running(faults=["hang:seconds=0.01"]) as simulator, wire(simulator.url) as connection:
        with pytest.raises(asyncio.IncompleteReadError):
            await connection.ask(chat())


async def test_bodies_can_be_spoiled():
    rules = ["error_body", "not_json", "pretty", "pretty", "array", "empty", "big"]
    marks = [f"{kind}:match=case{n}-" for n, kind in enumerate(rules)]
    marks[3] += ":crlf=1"
    marks[6] += ":bytes=17000000"
    async with running(faults=marks) as simulator:
        bodies = [(await whole(simulator.url, chat(f"case{n}-")))[2] for n in range(len(rules))]
    error, html, pretty, crlf, array, empty, big = bodies
    assert json.loads(error)["error"]["code"] == "engine_error"
    assert "choices" not in json.loads(error)
    assert html.startswith(b"<html>")
    assert b"\n  " in pretty
    assert b"\r" not in pretty
    assert crlf.count(b"\r\n") == crlf.count(b"\n") > 10
    assert json.loads(crlf)["object"] == "chat.completion"
    assert json.loads(array)[0]["object"] == "chat.completion"
    assert empty == b""
    assert len(big) == 17_000_000
    assert json.loads(big)["object"] == "chat.completion"


async def test_a_prompt_or_a_header_can_request_a_fault_for_one_line():
    async with running() as simulator:
        assert (await ask(simulator.url, chat("please [[fault:503:retry_after=3]]")))[1]["retry-after"] == "3"
        assert (await ask(simulator.url, chat(), x_simulator_fault="500"))[0] == 500
        assert (await ask(simulator.url, chat()))[0] == 200
        status, _, body = await ask(simulator.url, chat("[[fault:bogus]]"))
        assert status == 400
        assert "there is no kind 'bogus'" in body["error"]["message"]
        assert simulator.stats()["faults"] == {"503": 1, "500": 1}
    async with running(is_prompt_obeyed=False) as simulator:
        assert (await ask(simulator.url, chat("please [[fault:503]]")))[0] == 200


async def test_a_fault_for_the_first_times_lets_the_retry_succeed():
    async with running() as simulator:
        found = [(await ask(simulator.url, chat("[[fault:500:times=2]]")))[0] for _ in range(4)]
        assert found == [500, 500, 200, 200]


async def test_rules_are_put_listed_and_taken_away_while_it_runs():
    async with running() as simulator:
        url = simulator.url
        rules = {"faults": ["429:0.5:limit=3:retry_after=2", "500:model=other"]}
        _, _, found = await ask(url, rules, "/simulator/faults")
        assert [one["fault"] for one in found["faults"]] == ["429:0.5:limit=3:retry_after=2", "500:model=other"]
        assert (await ask(url, chat(model="other")))[0] in (429, 500)
        for n in range(30):
            await ask(url, chat(str(n)))
        _, _, found = await ask(url, b"", "/simulator/faults", "GET")
        assert found["faults"][0]["fired"] == 3
        assert (await ask(url, {"faults": ["x"]}, "/simulator/faults"))[0] == 400
        assert len((await ask(url, b"", "/simulator/faults", "GET"))[2]["faults"]) == 2
        assert (await ask(url, {"faults": []}, "/simulator/faults"))[2] == {"faults": []}
        assert (await ask(url, chat(model="other")))[0] == 200


def test_a_share_is_kept_and_does_not_depend_on_the_order():
    rules = [parse("500:0.1")]
    hits = {key for key in range(10_000) if Faults(rules, 1).choose("m", b"", key, 1)}
    assert 900 < len(hits) < 1100
    backwards = Faults(rules, 1)
    assert {key for key in reversed(range(10_000)) if backwards.choose("m", b"", key, 1)} == hits
    assert {key for key in range(10_000) if Faults(rules, 2).choose("m", b"", key, 1)} != hits


@pytest.mark.parametrize(
    "text", [*KINDS, "429:0.05:retry_after=2", "drop:times=1:after=5", "slow:0.5:match=x:seconds=2"]
)
def test_a_rule_reads_as_it_was_written(text):
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("200", "there is no kind '200'; use 400 to 599, array, bad_json"),
        ("500:2", "rate=2 must be a number from 0 to 1"),
        ("500:nan", "rate=nan must be a number"),
        ("500:seconds=2", "'seconds=2' is not an option; 500 accepts code, limit"),
        ("hang:0.1:soon", "'soon' is not an option; hang accepts"),
        ("big:bytes=1e12", "bytes=1e12 must be a number from 0 to"),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(text, message):
    with pytest.raises(InvalidInput, match=message):
        parse(text)
