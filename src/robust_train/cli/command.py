"""The types of the command line: `Command` and `Option` describe a command in the table of
``cli/commands.py``, and `Answer` is a command's result, which ``cli/main.py`` prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from robust_train.model.errors import EXIT_BAD_CONFIG, NotDoneError
from robust_train.model.feature import load_named
from robust_train.readable import align_columns, cell_text

if TYPE_CHECKING:
    from robust_train.model.events import Json


@dataclass(frozen=True)
class Option:
    """An option or a positional argument, as ``argparse`` adds it."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    key: str = ""  # the config key that the option sets, or for a flag the override KEY=VALUE


def option(*names: str, key: str = "", **settings: Any) -> Option:
    """Describe an option with the arguments of ``ArgumentParser.add_argument``."""
    return Option(names, settings, key)


flag = partial(option, action="store_true")
"""Describe an option without a value."""


@dataclass(frozen=True)
class Command:
    """A command of ``robust-train``.

    Attributes:
        name: one or two words, such as ``memory clear``.
        help: its effect, in one short line.
        function: ``module:function`` in ``robust_train.cli``, imported when the command runs. The
            function takes the parsed arguments, which include the command's name as ``command``.
            It returns an `Answer`, or the exit code if it printed everything itself.
        options: its arguments, in addition to ``--help``.
        about: its effect in full. If empty, ``help`` is shown instead.
        epilog: ``module:NAME`` of a text to print below the options.
        takes_program: after the options, the command line of a program follows. It is in
            ``arguments.program``.
        parses_itself: the function takes the unparsed arguments, as a list of strings.
    """

    name: str
    help: str
    function: str
    options: tuple[Option, ...] = ()
    about: str = ""
    epilog: str = ""
    takes_program: bool = False
    parses_itself: bool = False

    @property
    def options_with_value(self) -> set[str]:
        """The names of the options that take a value."""
        return {
            name
            for each in self.options
            for name in each.names
            if name.startswith("-") and each.settings.get("action") != "store_true"
        }


def load(reference: str) -> Any:
    """Import the object that ``module:name`` in ``robust_train.cli`` refers to."""
    return load_named(f"robust_train.cli.{reference}")


def ask_user(question: str, arguments: argparse.Namespace) -> bool:
    """Ask a question, and return whether the user agrees. ``--yes`` agrees without a question.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    if arguments.yes:
        return True
    if arguments.json or not sys.stdin.isatty():
        raise UsageError("not a terminal: pass --yes, or --dry-run to only list them")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


class UsageError(NotDoneError):
    """The command line has a mistake, or names something that cannot be used."""

    exit_code = EXIT_BAD_CONFIG


@dataclass(frozen=True)
class Table:
    """Rows below the columns' names. None and empty cells are shown as unknown, and integers are
    aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def print(self) -> None:
        """Print plain columns. On a narrow terminal, long cells fold."""
        lines = align_columns(self.rows, self.columns)
        width = shutil.get_terminal_size().columns
        if not sys.stdout.isatty() or max(map(len, lines)) <= width:
            print("\n".join(lines))
            return
        from rich.console import Console
        from rich.table import Table as FoldedTable
        from rich.text import Text

        table = FoldedTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            # A name may contain rich's markup, which only a Text shows as it is. Cells fold instead
            # of losing their end, so that a UUID can be copied.
            table.add_row(*(Text(cell_text(cell), overflow="fold") for cell in row))
        Console().print(table)


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Attributes:
        data: for programs (``--json``), in JSON's types.
        shown: for people, from top to bottom.
        warnings: for people, on stderr.
        asides: lines on stderr without the word "warning", for a command whose output is pasted.
        error: the reason why the command failed, empty if it succeeded.
        exit_code: the command's exit code. With an error, 0 becomes 1.
    """

    data: dict[str, Json] = field(default_factory=dict)
    shown: Sequence[str | Table] = ()
    warnings: Sequence[str] = ()
    asides: Sequence[str] = ()
    error: str = ""
    exit_code: int = 0

    def print(self, command: str, as_json: bool) -> None:
        """Print the answer for programs or for people."""
        if self.error:
            print(f"robust-train {command}: {self.error}", file=sys.stderr)
        if as_json:
            error = {"error": self.error} if self.error else {}
            print(json.dumps({**error, **self.data}, indent=2, default=str))
            return
        for warning in self.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for aside in self.asides:
            print(aside, file=sys.stderr)
        for part in self.shown:
            if isinstance(part, Table):
                part.print()
            else:
                print(part)


def converter(
    convert: Callable[[str], float], accepts: Callable[[float], bool], accepted: str
) -> Callable[[str], float]:
    """Return a converter for an option's value.

    Args:
        convert: ``int`` or ``float``.
        accepts: whether a value is accepted.
        accepted: the accepted values in words, for the message that refuses another value.
    """

    def convert_accepted(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if accepts(value):
                return value
        raise argparse.ArgumentTypeError(f"{text}: accepted is {accepted}")

    return convert_accepted
