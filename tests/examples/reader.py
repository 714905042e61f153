"""A reader who runs what the pages print: block by block, page after page, in one folder and on one database.

A fenced block is run if it is `bash` or `console`, and written to a file if a comment above it names one. These
comments are possible:

    <!-- example: pages.py -->       the block is this file (of any language), or a script that has this name in tests
    <!-- terminal -->                runs in a terminal of its own, until its section ends
    <!-- not run: REASON -->         is not run, and says why

A block of Python that is not a file must say why it is not run. In a `console` block, lines after `$` are commands and
the others are what they print, where `…` stands for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.conftest import skip

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>[\w-]*)\n(?P<text>.*?)^```$|^(?P<heading>#+) ",
    re.MULTILINE | re.DOTALL,
)
SHELL = ("bash", "console")
# Output of a terminal after which the reader continues.
READY = {"simulate": r"http://|providers\.env", "up": r"runs \S+", "worker": r"runs \S+"}
PORTS = ("8765", "9000")
PAGE_SECONDS = 400
END_SECONDS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    section: int
    language: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        return self.mark.removeprefix("example: ") if self.mark.startswith("example: ") else None

    @property
    def not_run(self) -> str | None:
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None

    @property
    def is_terminal(self) -> bool:
        return self.mark == "terminal"

    def commands(self) -> str:
        if self.language == "bash":
            return self.text
        lines, is_command = [], False
        for line in self.text.splitlines():
            is_command = line.startswith("$ ") or (is_command and lines[-1].endswith("\\"))
            if is_command:
                lines.append(line.removeprefix("$ "))
        return "\n".join(lines) + "\n"

    def printed(self) -> list[str]:
        """The output that a console block shows below its commands."""
        lines = self.text.splitlines() if self.language == "console" else []
        commands = set(self.commands().splitlines())
        shown = [line for line in lines if line.removeprefix("$ ") not in commands]
        return [line for line in shown if line.strip()]


def blocks(page: Path) -> list[Block]:
    text, section, found = page.read_text(encoding="utf-8"), 0, []
    for fence in FENCE.finditer(text):
        if fence["heading"]:
            section += fence["heading"] == "##"
            continue
        line = text.count("\n", 0, fence.start()) + 1
        found.append(
            Block(
                page=page, line=line, section=section, language=fence["language"], text=fence["text"],
                mark=fence["mark"] or "",
            )
        )  # fmt: skip
    return found


def shelf(*names: str) -> list[Path]:
    """The pages of the site's navigation, in order."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Lenient)["nav"]
    shelves = {name: pages for entry in nav for name, pages in entry.items()}
    places = [place for name in names for entry in shelves[name] for place in entry.values()]
    return [ROOT / "README.md" if place == "index.md" else ROOT / "docs" / place for place in places]


class _Lenient(yaml.SafeLoader):
    """A YAML loader that ignores the tags of mkdocs."""


_Lenient.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


class Reader:
    """Runs pages one after the other: a shell for each, in one folder, on one database."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("curl") is None:
            skip("curl is not installed")
        self.folder = folder
        self.ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))

    def read(self, page: Path) -> str:
        """Run a page and return its output; fail where the page is wrong."""
        found = [block for block in blocks(page) if block.not_run is None]
        for block in found:
            if block.file and block.language not in SHELL:
                (self.folder / block.file).write_text(self._ported(block.text), encoding="utf-8")
        told = self._run(_script([block for block in found if block.language in SHELL]))
        assert told.returncode == 0, f"{page.name}: exit {told.returncode}\n{told.stdout}\n{told.stderr}"
        for block in found:
            said = told.stdout.partition(f"@@ {block.place}\n")[2].partition("@@ ")[0]
            for line in block.printed() if not block.is_terminal else ():
                form = ".*".join(re.escape(piece) for piece in self._ported(line).split("…"))
                assert re.search(form, said), f"{block.place} promises {line!r}, and printed:\n{said}\n{told.stderr}"
        return told.stdout

    def _ported(self, text: str) -> str:
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text.replace("simulate --providers ", "simulate --providers --port 0 ")

    def _run(self, script: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
        environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATCHWRIGHT_API_PORT": self.ports["8765"],
            "BATCHWRIGHT_DATABASE_FOLDER": str(self.folder / "data"),
            "BATCHWRIGHT_LOG_FORM": "text",
        }
        with (self.folder / "printed.log").open("w+") as printed, (self.folder / "errors.log").open("w+") as errors:
            shell = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", "-c", self._ported(script)],
                cwd=self.folder, env=environment, stdout=printed, stderr=errors, start_new_session=True,
            )  # fmt: skip
            try:
                code = shell.wait(PAGE_SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                _end(shell)
            printed.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(shell.args, code, printed.read(), errors.read())


def _end(shell: subprocess.Popen[bytes]) -> None:
    """End all processes that a page has left running, and wait for their end."""
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            shell.poll()
            os.killpg(shell.pid, signal.SIGTERM if time.monotonic() < deadline - END_SECONDS + 1 else 0)
            time.sleep(0.5)
        os.killpg(shell.pid, signal.SIGKILL)


PRELUDE = """
stop() {  # ends terminals and what the page left in the background, and waits for it
    for ONE in "$@"; do kill "$ONE" 2>/dev/null || true; done
    for ONE in "$@"; do wait "$ONE" || [ $? -ge 127 ] || return 1; done
}
ready() {  # log, pattern: waits until a terminal has printed it
    for _ in $(seq 1800); do grep -qE "$2" "$1" && return; sleep 0.1; done
    echo "a terminal is not ready:" >&2; cat "$1" >&2; return 1
}
trap 'stop $(jobs -p)' EXIT
"""


def _script(found: list[Block]) -> str:
    lines, open_terminals = [PRELUDE], []
    section = 0
    for number, block in enumerate(found):
        if block.section != section and open_terminals and section > 0:
            lines.append(f"stop {' '.join(open_terminals)}")
            open_terminals = []
        section = block.section
        lines.append(f"echo; echo '@@ {block.place}'; echo \"{block.place} at $SECONDS s\" >&2")
        if block.is_terminal:
            name = f"TERMINAL_{number}"
            lines += [_terminal(block, name)]
            open_terminals += [f"${name}"] if section > 0 else []
        else:
            lines.append(block.commands())
    return "\n".join(lines)


def _terminal(block: Block, name: str) -> str:
    commands = block.commands().strip()
    command = re.search(r"\bbatchwright (\w+)", commands)
    assert command is not None, f"{block.place}: a terminal is for a command of Batchwright"
    log = f'"$PWD/{name}.log"'
    own = re.sub(r"(?:^|(?<=[;\n ]))batchwright ", "exec batchwright ", commands, count=1)
    if variables := re.match(r"((?:[A-Z_]+=\S+ )+)exec ", own):
        own = f"export {variables[1]}; {own[len(variables[1]) :]}"
    return f": > {log}; bash -euc {shlex.quote(own)} > {log} 2>&1 & {name}=$!\nready {log} '{READY[command[1]]}'"


def _free_ports(count: int) -> list[str]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
