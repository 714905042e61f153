"""Parsers that misbehave; they replace a real one in the sandbox's table of extractors."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path

from batchwright.errors import Transient
from batchwright.ingest.text import CanonicalText, Page


def allocate_without_end(document, builder):
    kept = []
    while True:
        kept.append(bytearray(10_000_000))


def answer_with_environment(document, builder):
    builder.add("\n".join(os.environ))


def ask_for_a_retry(document, builder):
    raise Transient("the dictionary is locked", code="dictionary_locked")


def crash(document, builder):
    ctypes.string_at(0)


def exit_at_once(document, builder):
    os._exit(3)


def hang(document, builder):
    threading.Event().wait()


def hang_deaf(document, builder):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    hang(document, builder)


def kill_itself(document, builder):
    os.kill(os.getpid(), signal.SIGKILL)


def loop(document, builder):
    while True:
        pass


def print_noise(document, builder):
    os.write(1, b"noise" * 1_000)
    builder.add("quiet")


def raise_something(document, builder):
    raise ZeroDivisionError("in a table of no columns")


def say_nothing_of_use(document, builder):
    text = CanonicalText(text="x", format="text")
    object.__setattr__(text, "pages", (Page(1, 5, 9),))
    builder.add("x")
    builder.build = lambda _: text


def talk_without_end(document, builder):
    builder.add("é" * (document.limits.output_bytes - 10))


def write_a_file(document, builder):
    Path(document.data.decode()).write_bytes(b"mine")
