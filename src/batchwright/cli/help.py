"""Help texts that fit a terminal of 80 columns: flags as they are typed, whole words, and all commands on a screen.

Typer's own help puts each option into four columns in a frame. At 80 columns, these cut the names of flags and
environment variables, and show a flag without a value as one that takes a `<bool>`.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import typer

GROUPS = ("Start", "Batches", "Jobs", "Operate")
_GAP = 2
_LEFT_MAX = 26
_CHOICES_MAX = 50
_WIDTH_MAX = 100
_WIDTH_MIN = 40
_KINDS = {"int": "N", "float": "NUMBER", "path": "FILE"}
_VALUE = re.compile(r"<([^<>]+)>")
_BETWEEN = re.compile(r"([\d.]+)<=x<=([\d.]+)")
_AT_LEAST = re.compile(r"x>=([\d.]+)")


def use_our_help(command: Any) -> Any:
    """Give a command, and all commands below it, help texts in our form."""
    command.format_help = MethodType(_write_help, command)
    for below in getattr(command, "commands", {}).values():
        use_our_help(below)
    return command


def write_root_help(command: Any, context: Any, formatter: Any) -> None:
    """One line for each command and no blank lines between groups: all of them fit on a screen of 24 lines."""
    usage = f"Usage: {context.command_path} COMMAND [ARGS]..."
    lines = [typer.style(f"Batchwright: {command.help}", bold=True)]
    lines += [f"{usage}  {context.command_path} COMMAND --help shows more.", ""]
    rows = list(_grouped(command.commands))
    flags = ", ".join("/".join(flag.opts) for flag in command.get_params(context))
    label_columns = max(len(label) for label, *_ in [*rows, ("Options",)])
    name_columns = max(len(name) for _, name, _ in rows)
    lines += [f"{_label(label, label_columns)}  {name:{name_columns}}  {text}" for label, name, text in rows]
    lines.append(f"{_label('Options', label_columns)}  {flags}")
    formatter.write("\n".join(lines) + "\n")


def _grouped(commands: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The group at its first command, the command, and its line of help."""
    groups: dict[str, list[Any]] = {group: [] for group in GROUPS}
    for command in commands.values():
        groups.setdefault(getattr(command, "group", "Other"), []).append(command)
    for group, listed in groups.items():
        # The command that the group is named after comes first.
        ordered = sorted(listed, key=lambda command: not group.lower().startswith(command.name))
        for place, command in enumerate(ordered):
            yield "" if place else group, command.name, command.help


def _label(text: str, columns: int) -> str:
    return typer.style(f"{text:{columns}}", fg="cyan", bold=True)


def _write_help(command: Any, context: Any, formatter: Any) -> None:
    width = max(_WIDTH_MIN, min(shutil.get_terminal_size().columns, _WIDTH_MAX))
    formatter.write("\n".join(_help_lines(command, context, width)) + "\n")


def _help_lines(command: Any, context: Any, width: int) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = ["[OPTIONS]", *map(_argument_usage, arguments)]
    usage += ["COMMAND [ARGS]..."] if hasattr(command, "commands") else []
    yield from _wrap(f"Usage: {context.command_path} {' '.join(usage)}", width, " " * 7)
    for paragraph in (command.help or "").partition("\f")[0].split("\n\n"):
        yield ""
        yield from _wrap(paragraph, width)
    sections = {
        "Arguments": [(_argument_name(one), one.help or "") for one in arguments],
        "Options": [record for one in command.get_params(context) if (record := _option(one, context))],
        "Commands": [
            (name, below.help or "") for name, below in getattr(command, "commands", {}).items() if not below.hidden
        ],
    }
    for title, rows in sections.items():
        if rows:
            yield ""
            yield typer.style(title, fg="cyan", bold=True)
            yield from _two_columns([(left, _readable(right)) for left, right in rows], width)


def _option(parameter: Any, context: Any) -> tuple[str, str] | None:
    if parameter.param_type_name == "argument" or getattr(parameter, "hidden", False):
        return None
    record: tuple[str, str] | None = parameter.get_help_record(context)
    if record is None:
        return None
    left, right = _VALUE.sub(_name_value, record[0]), record[1]
    flag, _, choices = left.rpartition(" ")
    if "|" in choices and len(left) > _CHOICES_MAX:
        return f"{flag} {parameter.name.upper()}", f"{right} One of {choices.replace('|', ', ')}."
    return left, right


def _two_columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """A text that does not fit into the left column gets its own line."""
    columns = min(_LEFT_MAX, max(len(left) for left, _ in rows))
    indent = " " * (_GAP + columns + _GAP)
    for left, right in rows:
        lines = _wrap(right.partition("\n\n")[0], width - len(indent)) or [""]
        if len(left) <= columns:
            yield f"{'':{_GAP}}{left:{columns}}{'':{_GAP}}{lines[0]}".rstrip()
            lines = lines[1:]
        else:
            yield f"{'':{_GAP}}{left}"
        yield from (f"{indent}{line}".rstrip() for line in lines)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap at spaces only, because a hyphen may belong to a flag."""
    plain = " ".join(text.split())
    return textwrap.wrap(plain, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _name_value(found: re.Match[str]) -> str:
    """Typer's `<int range>` becomes N, and its `<read|submit>` becomes read|submit."""
    kind = found[1].removeprefix("list[").removesuffix("]")
    return kind if "|" in kind else _KINDS.get(kind.split(maxsplit=1)[0], "TEXT")


def _argument_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]")


def _argument_usage(argument: Any) -> str:
    name = _argument_name(argument)
    if argument.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if argument.required else f"[{name}]"


def _readable(text: str) -> str:
    """Ranges in words: `0<=x<=9` is 0 to 9."""
    return _AT_LEAST.sub(r"at least \1", _BETWEEN.sub(r"\1 to \2", text))
