"""The root of the command line: the commands of parts, which are loaded when they are called."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from batchwright.cli.exit_codes import CANCELLED, FAILED, INTERRUPTED
from batchwright.cli.hangup import interrupt_on_hangup
from batchwright.cli.help import use_our_help, write_root_help
from batchwright.errors import BatchwrightError, ConfigurationError, DatabaseUnavailable, JobCancelled
from batchwright.part import Command
from batchwright.plugins import load, part_kinds


class LazyCommand(TyperCommand):
    """A command of a part, as the list of commands shows it.

    It is loaded when its context is created: to run it, to show its help, or to complete it in a shell.
    """

    def __init__(self, name: str, command: Command, part: str) -> None:
        super().__init__(name, help=command.help)
        self.part = part
        self.group = command.group
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> Any:
        """The command itself, or the group of commands. If it has no help text, it gets the text from the list."""
        assert self.name is not None
        try:
            command = _make_command(self.name, load(self._command.place))
        except Exception as error:
            raise ConfigurationError(
                f"the command {self.name!r} of the part {self.part!r} ({self._command.place}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        command.help = command.help or self.help
        return use_our_help(command)


def _make_command(name: str, found: Any) -> Any:
    """From a function with typer's annotations, or from a `typer.Typer`."""
    holder = typer.Typer(rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return get_group(holder).commands[name]


class Root(TyperGroup):
    """Lists the commands of all parts by group, on one screen, without importing them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for kind in part_kinds():
            for name, command in kind.commands.items():
                if (other := self.commands.get(name)) is not None:
                    parts = f"{getattr(other, 'part', None)!r} and {kind.name!r}"
                    raise ConfigurationError(f"two parts have a command {name!r}: {parts}; remove one of them")
                self.add_command(LazyCommand(name, command, kind.name))

    def format_help(self, context: Any, formatter: Any) -> None:
        write_root_help(self, context, formatter)


app = typer.Typer(
    name="batchwright",
    cls=Root,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def batchwright(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Durable batch work for AI, in Python, on PostgreSQL."""
    if version:
        typer.echo(f"batchwright {version_of('batchwright')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run a command. Expected errors print one line; any other error is a bug and shows its traceback."""
    interrupt_on_hangup()
    try:
        code = app(prog_name="batchwright", standalone_mode=False)
    except DatabaseUnavailable as error:
        from batchwright.db.check import explained

        code = _complain(str(explained(error)), FAILED)
    except JobCancelled as error:
        code = _complain(str(error), CANCELLED)
    except BatchwrightError as error:
        code = _complain(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # Typer has a copy of click or uses the installed one. In both, errors in the command line have this method.
        if not hasattr(error, "format_message"):
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "batchwright")
        code = _complain(f"{error.format_message()} See: {path} --help", getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(text: str, code: int) -> int:
    """Print an error as one line, unless the message contains lines to put into a file: these stay separate."""
    if "\n    " not in text:
        text = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    from batchwright.terminal import columns_of, wrap  # here, because the list of commands needs neither

    typer.echo(wrap(f"error: {text}", columns_of(sys.stderr)), err=True)
    return code
