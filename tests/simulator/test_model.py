"""The model of a server's speed against arithmetic and against a slow simulation in small steps."""

import math
import random

import pytest

from batchwright.errors import ConfigurationError
from batchwright.simulator.model import ModelServer, Ticket
from batchwright.simulator.profiles import PROFILES, Profile, named_model


def ticket(name="", prompt=0, output=0, links=()):
    return Ticket(name, prompt_tokens=prompt, output_tokens=output, links=links)


def ends(server, until=math.inf):
    """The time at which each ticket was done, by owner, if the model is advanced to each next event."""
    found = {}
    for _ in range(100_000):
        at = server.next_at()
        if at > until or at == math.inf:
            return found
        found |= {one.owner: at for one in server.advance(at)}
    raise AssertionError("the model does not come to an end")


def test_a_single_request_takes_the_time_of_its_prompt_and_of_its_output():
    server = ModelServer(Profile(prefill_rate=1000, decode_rate=50, decode_rate_total=400))
    assert server.arrive(2.0, ticket("a", prompt=500, output=100))
    assert ends(server) == {"a": pytest.approx(2.0 + 0.5 + 2.0)}


def test_prompts_share_the_rate_and_the_short_one_is_done_first():
    server = ModelServer(Profile(prefill_rate=100, decode_rate=0))
    server.arrive(0.0, ticket("short", prompt=100))
    server.arrive(0.0, ticket("long", prompt=300))
    # Each reads 50/s until 2.0; then 200 are left for the long one alone.
    assert ends(server) == {"short": pytest.approx(2.0), "long": pytest.approx(4.0)}


@pytest.mark.parametrize("running", [1, 2, 8, 64, 1000])
def test_the_total_output_rate_has_a_ceiling(running):
    profile = Profile(decode_rate=50, decode_rate_total=1000, max_running=running)
    server = ModelServer(profile)
    for n in range(running):
        server.arrive(0.0, ticket(n, output=200))
    took = max(ends(server).values())
    step = 1 / 50 + (running - 1) / 1000
    assert took == pytest.approx(200 * step)
    assert running * 200 / took == pytest.approx(running / step)
    assert running * 200 / took < 1000 + 50


def test_requests_beyond_the_slots_wait_in_order_and_take_a_freed_slot_at_once():
    server = ModelServer(Profile(decode_rate=10, max_running=2))
    for name in "abcd":
        server.arrive(0.0, ticket(name, output=10))
    assert (server.running, len(server.waiting)) == (2, 2)
    # Advancing only once, late, changes nothing: each event happens at its own time.
    done = server.advance(10.0)
    assert [one.owner for one in done] == ["a", "b", "c", "d"]
    assert [one.started_at for one in done] == [0.0, 0.0, pytest.approx(1.0), pytest.approx(1.0)]
    assert server.slot_seconds_at(10.0) == pytest.approx(4.0)


def test_a_full_queue_refuses():
    server = ModelServer(Profile(decode_rate=1, max_running=1, max_waiting=1))
    assert [server.arrive(0.0, ticket(n, output=5)) for n in range(3)] == [True, True, False]
    server.advance(5.0)
    assert server.arrive(5.0, ticket("later", output=1))


def test_without_a_queue_a_free_slot_still_serves():
    server = ModelServer(Profile(decode_rate=1, max_running=1, max_waiting=0))
    assert [server.arrive(0.0, ticket(n, output=5)) for n in range(2)] == [True, False]


def test_a_request_without_writing_frees_its_slot_for_the_next():
    server = ModelServer(Profile(prefill_rate=100, decode_rate=10, max_running=1))
    for name in "ab":
        server.arrive(0.0, ticket(name, prompt=100))
    assert ends(server) == {"a": pytest.approx(1.0), "b": pytest.approx(2.0)}


def test_an_abort_frees_slot_and_rate_at_once():
    server = ModelServer(Profile(prefill_rate=100, decode_rate=10, max_running=2))
    gone, stays, waits = ticket("gone", prompt=200), ticket("stays", prompt=200), ticket("waits", prompt=100)
    for one in (gone, stays, waits):
        server.arrive(0.0, one)
    server.abort(1.0, gone)
    assert (server.running, len(server.waiting), waits.started_at) == (2, 0, 1.0)
    server.abort(1.0, waits)
    # 50 were read by 1.0, the other 150 alone at 100/s.
    assert ends(server) == {"stays": pytest.approx(2.5)}
    server.abort(3.0, stays)
    assert server.running == 0


def test_an_abort_in_the_queue_removes_only_that_request():
    server = ModelServer(Profile(decode_rate=10, max_running=1))
    running, queued, next = (ticket(name, output=10) for name in ("running", "queued", "next"))
    for one in (running, queued, next):
        server.arrive(0.0, one)
    server.abort(0.5, queued)
    assert ends(server) == {"running": pytest.approx(1.0), "next": pytest.approx(2.0)}


def test_a_changed_capacity_holds_for_those_inside():
    server = ModelServer(Profile(decode_rate=10, max_running=1))
    for name in "ab":
        server.arrive(0.0, ticket(name, output=10))
    server.change(0.5, Profile(decode_rate=5, max_running=2))
    assert server.running == 2
    assert ends(server) == {"a": pytest.approx(1.5), "b": pytest.approx(2.5)}
    server.arrive(3.0, ticket("c", output=10))
    server.change(3.1, Profile(decode_rate=0))
    assert [one.owner for one in server.advance(3.1)] == ["c"]


def test_random_loads_end_when_a_simulation_in_small_steps_says():
    dice = random.Random(7)
    profile = Profile(prefill_rate=400, decode_rate=20, decode_rate_total=90, max_running=5)
    arrivals = sorted((dice.uniform(0, 8), n, dice.randrange(1, 300), dice.randrange(0, 60)) for n in range(40))
    server = ModelServer(profile)
    found = {}
    for at, n, prompt, output in arrivals:
        found |= ends(server, at)
        server.arrive(at, ticket(n, prompt=prompt, output=output))
    found |= ends(server)
    expected = stepped(profile, arrivals, step=0.0005)
    assert found.keys() == expected.keys()
    assert all(abs(found[n] - expected[n]) < 0.1 for n in found)


def stepped(profile, arrivals, step):
    """The same server, simulated in small steps."""
    left = {n: [prompt, output] for _, n, prompt, output in arrivals}
    queue, running, ended, now = [(at, n) for at, n, _, _ in arrivals], [], {}, 0.0
    while len(ended) < len(arrivals):
        while queue and queue[0][0] <= now and len(running) < profile.max_running:
            running.append(queue.pop(0)[1])
        readers = [n for n in running if left[n][0] > 0]
        writers = [n for n in running if left[n][0] <= 0]
        for n in readers:
            left[n][0] -= step * profile.prefill_rate / len(readers)
        for n in writers:
            left[n][1] -= step / (1 / profile.decode_rate + (len(writers) - 1) / profile.decode_rate_total)
        now += step
        for n in list(running):
            if left[n][0] <= 0 and left[n][1] <= 0:
                running.remove(n)
                ended[n] = now
    return ended


def test_a_prompt_is_cached_when_it_has_been_read_and_not_before():
    server = ModelServer(Profile(prefill_rate=100, decode_rate=10))
    links = [1, 2, 3]
    first, twin, later = (ticket(name, prompt=50, output=1, links=links) for name in ("first", "twin", "later"))
    server.arrive(0.0, first)
    server.arrive(0.1, twin)
    ends(server)
    server.arrive(20.0, later)
    assert (first.cached_tokens, twin.cached_tokens, later.cached_tokens) == (0, 0, 48)
    assert ends(server) == {"later": pytest.approx(20.0 + 0.02 + 0.1)}


def test_models_are_named_with_their_profile():
    assert named_model("qwen:7b", "fast") == ("qwen", "7b")
    assert named_model("qwen", "fast") == ("qwen", "fast")
    assert named_model("llama3:8b:fast", "7b") == ("llama3:8b", "fast")
    with pytest.raises(ConfigurationError, match="needs one too, as in llama3:8b:fast"):
        named_model("llama3:8b", "fast")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_running": 0}, "max_running is 0, but must be 1 or more"),
        ({"prefill_rate": -1}, "prefill_rate is -1, but must be 0 or more"),
        ({"refuse_status": 500}, "must be 429 or 503"),
        ({"speed": 1}, "a profile has no 'speed'; it has cache_blocks"),
        ({"max_running": "8"}, "max_running is '8', but must be a number"),
        ({"max_running": None}, "max_running is None, but must be a number"),
        ({"max_waiting": -1}, "max_waiting is -1"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_reason(values, message):
    with pytest.raises(ConfigurationError, match=message):
        PROFILES["fast"].with_values(values)
