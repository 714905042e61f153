"""Hosts on one machine: network namespaces, joined to a hub by links that can be cut.

    hub      198.18.0.1 database          198.18.1.1 store, model server
                  │ bridge                     │ bridge
    hosts    198.18.0.2, 198.18.0.3 …     198.18.1.2, 198.18.1.3 …

Each host has one link to the database and one to the services. This process runs in the hub (`enter_hub`). Namespaces
have no names, and processes hold them open: the kernel removes them, with their links, when the last process in them
ends. A run that is killed leaves nothing behind. The addresses are reserved for tests of networks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Network = Literal["database", "services"]
NETWORKS: dict[Network, str] = {"database": "198.18.0", "services": "198.18.1"}
PROGRAMS = ("ip", "nsenter", "unshare")
_HOLD = "echo; read -r _"
_SECONDS_MAX = 20.0
_TRY = "ip link add bridge type bridge && ip link add near type veth peer name far"


def why_refused() -> str | None:
    """The kernel's error if this user may not create namespaces and links; None if it may."""
    command = ["unshare", "--net", "sh", "-c", _TRY]
    tried = subprocess.run(command, capture_output=True, check=False, text=True, timeout=_SECONDS_MAX)
    return (tried.stderr.strip() or f"exit status {tried.returncode}") if tried.returncode else None


def enter_hub(module: str, *arguments: str) -> None:
    """Start this program again, in a network namespace of its own; never returns."""
    os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", module, *arguments])


def address(network: Network, place: int = 1) -> str:
    """The address of the hub, or of the host with this number."""
    return f"{NETWORKS[network]}.{place}"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace, known by the process that holds it open."""

    place: int
    pid: int

    @property
    def launcher(self) -> Sequence[str]:
        """What is put before a command to run it there."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def cut(self, *networks: Network) -> None:
        """From now on packets are dropped silently, in both directions."""
        self._set(networks, "down")

    def mend(self, *networks: Network) -> None:
        self._set(networks, "up")

    def link(self) -> None:
        """Create both links, to existing bridges of the hub."""
        _run(*self.launcher, "ip", "link", "set", "lo", "up")
        for network in NETWORKS:
            end = self._end(network)
            _run("ip", "link", "add", end, "type", "veth", "peer", "name", network, "netns", str(self.pid))
            _run("ip", "link", "set", end, "master", network, "up")
            _run(*self.launcher, "ip", "address", "add", f"{address(network, self.place)}/24", "dev", network)
            _run(*self.launcher, "ip", "link", "set", network, "up")

    def _set(self, networks: Sequence[Network], state: str) -> None:
        for network in networks:
            _run("ip", "link", "set", self._end(network), state)

    def _end(self, network: Network) -> str:
        return f"{network}{self.place}"


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """These hosts, linked to the hub in which this process runs."""
    _run("ip", "link", "set", "lo", "up")
    for network in NETWORKS:
        _run("ip", "link", "add", network, "type", "bridge")
        _run("ip", "address", "add", f"{address(network)}/24", "dev", network)
        _run("ip", "link", "set", network, "up")
    with contextlib.ExitStack() as stack:
        made = {name: Host(place, stack.enter_context(_held_open())) for place, name in enumerate(names, 2)}
        for host in made.values():
            host.link()
        yield made


@contextlib.contextmanager
def _held_open() -> Iterator[int]:
    """A process in a new namespace, which ends when we close its standard input, or die."""
    command = ["unshare", "--net", "sh", "-c", _HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()  # the namespace exists
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=_SECONDS_MAX)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
