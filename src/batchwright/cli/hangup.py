"""What happens when the terminal is closed (SIGHUP): the same as after Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import threading


class Terminal:
    """The terminal that we write to, if there is one."""

    def __init__(self) -> None:
        self._descriptors = [number for number in range(3) if os.isatty(number)]

    def detach_if_closed(self) -> None:
        """Redirect output to /dev/null if the terminal is closed: a write that fails must not keep us from stopping."""
        closed = [number for number in self._descriptors if not os.isatty(number)]
        for number in closed:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.close(nowhere)


def interrupt_on_hangup() -> None:
    """For commands without a `Stop`. Under `nohup` the signal stays ignored."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, functools.partial(_interrupt, Terminal()))


def _interrupt(terminal: Terminal, *_: object) -> None:
    """Act once, although both the kernel and a shell may send the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminal.detach_if_closed()
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:  # a shell starts background commands with Ctrl-C ignored
        raise KeyboardInterrupt
