"""Whose request is begun next."""

from __future__ import annotations

from collections.abc import Callable

from batchwright.api.turns import AT_ONCE, Turns, credentials


def test_a_crowd_of_one_key_delays_another_by_one_request() -> None:
    turns, begun = Turns(), list[str]()
    greedy, honest = (credentials([(b"authorization", key)]) for key in (b"Bearer a", b"Bearer b"))
    for who in (greedy, honest):
        turns.remember(who)

    def begin(name: str) -> Callable[[], bool]:
        return lambda: begun.append(name) is None

    for n in range(AT_ONCE + 100):
        turns.ask(greedy, begin(f"greedy {n}"))
    assert len(begun) == AT_ONCE
    turns.ask(honest, begin("honest"))
    for n in range(50):
        turns.ask(credentials([(b"authorization", b"Bearer made up %d" % n)]), begin("stranger"))
    for _ in range(3):
        turns.done()
    assert begun[AT_ONCE:] == [f"greedy {AT_ONCE}", "honest", "stranger"]
    for _ in range(2):
        turns.done()
    assert begun[AT_ONCE + 3 :] == [f"greedy {AT_ONCE + 1}", "stranger"]


def test_who_has_left_takes_no_turn() -> None:
    turns, begun = Turns(), list[int]()
    for _ in range(AT_ONCE):
        turns.ask(0, lambda: True)
    for n in range(10):
        turns.ask(0, lambda n=n: n == 9 and begun.append(n) is None)  # type: ignore[misc]
    turns.done()
    assert begun == [9]


def test_credentials_are_the_key_or_the_cookie() -> None:
    assert credentials([]) == credentials([(b"host", b"a")])
    assert credentials([(b"authorization", b"a")]) != credentials([(b"authorization", b"b")])
    assert credentials([(b"cookie", b"a")]) != credentials([])
