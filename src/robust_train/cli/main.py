"""The ``robust-train`` command: find the command, parse its arguments, print its answer."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import signal
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

import robust_train
from robust_train.cli.command import Answer, Command, CommandFailed, load
from robust_train.cli.commands import COMMANDS, GONE, members_of
from robust_train.host.screen import open_closed_streams
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HELP = {"-h", "--help"}
_COLUMNS = 78


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names and paths may hold what the locale has no character for
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
    except CommandFailed as error:
        print(f"robust-train {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *_FULL):
            raise
        # what is not written yet has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # `… | head` has seen enough
            return 128 + signal.SIGPIPE
        print(
            f"robust-train: cannot write the output: {error.strerror}", file=sys.stderr
        )
        return EXIT_FAILED
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in _HELP:
        print(_listing(COMMANDS.values()))
        return 0 if words else EXIT_BAD_CONFIG
    if words[0] == "--version":
        print(f"robust-train {robust_train.__version__}")
        return 0
    members = {} if words[0] in COMMANDS else members_of(words[0])
    if members and _HELP & set(words[1:2]):
        print(_listing(members.values()))
        return 0
    command, rest = find(words)
    if command.parses_itself:
        return int(load(command.function)(rest))
    if _HELP & set(_split(rest)[0]):
        print(parser_of(command).format_help(), end="")
        return 0
    arguments = parse(command, rest)
    try:
        answer: Answer | int = load(command.function)(arguments)
    except Exception as error:
        code = _exit_code_of(error)
        if not code:
            raise
        answer = Answer(error=str(error), exit_code=code)
    if isinstance(answer, int):
        return answer
    answer.print(command.name, getattr(arguments, "json", False))
    return answer.exit_code or (EXIT_FAILED if answer.error else 0)


def find(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command that a command line begins with, and the other words.

    Raises CommandFailed if there is no such command; it names the one that was probably meant.
    """
    first, second = words[0], words[1] if words[1:] else ""
    command = COMMANDS.get(first)
    members = {} if "--" in words else members_of(first)
    if second in members:
        return members[second], list(words[2:])
    if near := difflib.get_close_matches(second, members, n=1):
        problem = f"{first}: {second}: did you mean {near[0]}?"
        if command is not None and command.takes_program:
            problem += f" To run a program: -- {second}"
    elif command is not None:
        return command, list(words[1:])
    elif first in GONE:
        problem = f"{first} is gone: {GONE[first]}"
    elif members:
        what = f"{second}: no such action" if second else "an action is needed"
        problem = f"{first}: {what}: {', '.join(members)}"
    else:
        problem = f"{first}: no such command; {_meant(first)}"
    raise CommandFailed(problem, EXIT_BAD_CONFIG)


def _meant(word: str) -> str:
    """Return the command that is probably meant by one word, else all first words."""
    by_last_word = {name.split()[-1]: name for name in reversed(COMMANDS)}
    if near := difflib.get_close_matches(word, by_last_word, n=1):
        return f"did you mean {by_last_word[near[0]]}?"
    return f"there are {', '.join(dict.fromkeys(name.split()[0] for name in COMMANDS))}"


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what was wrong."""
        name = self.prog.partition(" ")[2]
        raise CommandFailed(f"{name}: {message}", EXIT_BAD_CONFIG)


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments, without a program after ``--``."""
    epilog = load(command.epilog) if command.epilog else ""
    if members := " | ".join(members_of(command.name)):
        epilog += f"\nsee also: robust-train {command.name} {members}\n"
    about = command.about or f"{command.help.capitalize()}."
    parser = _Parser(
        prog=f"robust-train {command.name}",
        description=textwrap.fill(about, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.takes_program:
        options = "[OPTIONS] [KEY=VALUE …]"
        parser.usage = f"robust-train {command.name} {options} -- PROGRAM [ARGUMENT …]"
    for each in command.options:
        parser.add_argument(*each.names, **each.settings)
    parser.set_defaults(command=command.name)
    return parser


def parse(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of a command; raise CommandFailed for a mistake."""
    if not command.takes_program:
        return parser_of(command).parse_args(words)
    own, program = _split(words)
    arguments = parser_of(command).parse_args(_joined(command, own))
    arguments.program = program
    return arguments


def _joined(command: Command, words: Sequence[str]) -> list[str]:
    """Return the words with an option that takes another program's arguments joined to its value,
    which may look like an option."""
    takes = {
        name
        for each in command.options
        for name in each.names
        if each.settings.get("metavar") == "ARGUMENTS"
    }
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in takes:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _listing(commands: Iterable[Command]) -> str:
    """Return usage and help of commands, a line each."""
    shown = {command.usage: command.help for command in commands}
    width = max(map(len, shown))
    lines = [f"  {usage.ljust(width)}  {text}" for usage, text in shown.items()]
    return "\n".join(
        [
            "usage: robust-train COMMAND [OPTIONS]",
            "",
            "commands:",
            *lines,
            "",
            "robust-train COMMAND --help shows the options of a command.",
        ]
    )


def _exit_code_of(error: Exception) -> int:
    """Return the exit code for an error that its message explains; 0 for any other."""
    from robust_train.folder.requests import ControlError, Refused
    from robust_train.folder.run_list import NoLiveRun
    from robust_train.queue.queue_dir import QueueProblem

    if isinstance(error, CommandFailed):
        return error.exit_code
    if isinstance(error, ControlError | Refused | NoLiveRun):
        return EXIT_FAILED
    return EXIT_BAD_CONFIG if isinstance(error, QueueProblem) else 0


if __name__ == "__main__":
    sys.exit(main())
