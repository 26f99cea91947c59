"""The ``robust-train`` program: finds the command in the table, parses its arguments, calls its
function and prints the answer."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import NoReturn

from robust_train.cli.command import Answer, Command, UsageError, load
from robust_train.cli.commands import COMMANDS, GROUPS, OTHER_NAMES, members_of
from robust_train.host.needs import find_missing_requirement
from robust_train.host.streams import open_closed_streams
from robust_train.model.errors import EXIT_BAD_CONFIG, EXIT_FAILED, NotDoneError, find_limit_error

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HELP = {"-h", "--help"}
_COLUMNS = 78
# Matches the start of KEY=VALUE. A name in capitals is not a key but an environment variable.
OVERRIDE = re.compile(r"(?![A-Z_\d]+=)[+~]{0,2}[\w./@]+=")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_closed_streams()
    problem = find_missing_requirement()
    if problem is not None:
        print(f"robust-train: {problem}", file=sys.stderr)
        return problem.exit_code
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and paths may contain characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
    except NotDoneError as error:
        print(f"robust-train {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        limit = find_limit_error(error)
        if limit is not None:
            print(f"robust-train: {limit}", file=sys.stderr)
            return limit.exit_code
        if not isinstance(error, OSError):
            raise
        if error.filename is not None or error.errno not in (errno.EPIPE, *_FULL):
            raise
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            # The reader, for example ``head``, has closed the pipe.
            return 128 + signal.SIGPIPE
        print(f"robust-train: cannot write the output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in _HELP:
        print(_list_commands(GROUPS))
        return 0 if words else EXIT_BAD_CONFIG
    if words[0] == "--version":
        print(f"robust-train {version('robust-train')}")
        return 0
    members = members_of(words[0])
    if members and _HELP & set(words[1:2]):
        print(_list_commands({"commands": members.values()}))
        return 0
    command, rest = find_command(words)
    if command.parses_itself:
        return int(load(command.function)(rest))
    options, _ = split_program(command, rest)
    if _HELP & set(options):
        print(parser_of(command).format_help(), end="")
        return 0
    arguments = parse(command, rest)
    try:
        answer: Answer | int = load(command.function)(arguments)
    except NotDoneError as error:
        answer = Answer(error=str(error), exit_code=error.exit_code)
    if isinstance(answer, int):
        return answer
    answer.print(command.name, getattr(arguments, "json", False))
    if answer.exit_code:
        return answer.exit_code
    return EXIT_FAILED if answer.error else 0


def find_command(words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command at the start of a command line, and the other words.

    Raises:
        UsageError: there is no such command. The message suggests a similar command.
    """
    for length in (2, 1):
        command = COMMANDS.get(" ".join(words[:length]))
        if command is not None:
            return command, list(words[length:])
    first = words[0]
    second = words[1] if words[1:] else ""
    members = members_of(first)
    near = difflib.get_close_matches(second, members, n=1)
    if near:
        problem = f"{first}: {second}: did you mean {near[0]}?"
    elif members:
        mistake = f"{second}: no such action" if second else "an action is needed"
        problem = f"{first}: {mistake}: {', '.join(members)}"
    else:
        problem = f"{first}: no such command; {_suggest_command(first)}"
    raise UsageError(problem)


def _suggest_command(word: str) -> str:
    """Return ``did you mean COMMAND?``, or the list of commands if none is similar."""
    by_last_word = {name.split()[-1]: name for name in reversed(COMMANDS)}
    if word in OTHER_NAMES:
        return f"did you mean {OTHER_NAMES[word]}?"
    near = difflib.get_close_matches(word, by_last_word, n=1)
    if near:
        return f"did you mean {by_last_word[near[0]]}?"
    first_words = dict.fromkeys(name.split()[0] for name in COMMANDS)
    return f"there are {', '.join(first_words)}"


class _Parser(argparse.ArgumentParser):
    """A parser that reports mistakes in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError, which for an unknown option also suggests a similar option or key."""
        name = self.prog.partition(" ")[2]
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            message += self._suggest(word)
        raise UsageError(f"{name}: {message}")

    def _suggest(self, word: str) -> str:
        from robust_train.config.keys import schema

        keys = {f"--{name.replace('_', '-')}": name for name in schema().root.members}
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        if takes_keys and word in keys:
            return f"; write {keys[word]}=…"
        near = difflib.get_close_matches(word, list(self._option_string_actions), n=1)
        return f"; did you mean {near[0]}?" if near else ""


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's own arguments, which end before the program that it runs."""
    epilog = load(command.epilog) if command.epilog else ""
    members = " | ".join(members_of(command.name))
    if members:
        epilog += f"\nsee also: robust-train {command.name} {members}\n"
    about = command.about
    if not about:
        about = f"{command.help[0].upper()}{command.help[1:]}."
    parser = _Parser(
        prog=f"robust-train {command.name}",
        description=textwrap.fill(about, _COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.takes_program:
        options = "[OPTIONS] [KEY=VALUE …]"
        parser.usage = f"robust-train {command.name} {options} [--] PROGRAM [ARGUMENT …]"
    for each in command.options:
        parser.add_argument(*each.names, **each.settings)
    parser.set_defaults(command=command.name)
    return parser


def parse(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments of a command.

    Raises:
        UsageError: the command line has a mistake.
    """
    options, program = split_program(command, words)
    arguments = parser_of(command).parse_args(options)
    arguments.program = program
    return arguments


def split_program(command: Command, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the command's own words and the words of the program that it runs.

    The program starts after ``--``, or at the first word that is neither an option, nor an option's
    value, nor KEY=VALUE.
    """
    if not command.takes_program:
        return list(words), []
    options: list[str] = []
    rest = list(words)
    while rest and (rest[0].startswith("-") or OVERRIDE.match(rest[0])):
        word = rest.pop(0)
        if word == "--":
            break
        if word in command.options_with_value and rest:
            # Joined by "=", because argparse takes a value that starts with a dash for an option.
            word += f"={rest.pop(0)}"
        options.append(word)
    # Options first, because argparse accepts overrides only if no option stands between them.
    options.sort(key=lambda word: not word.startswith("-"))
    return options, rest


def _list_commands(groups: Mapping[str, Collection[Command]]) -> str:
    """Return the usage, and a line of help for each command."""
    width = max(len(command.name) for commands in groups.values() for command in commands)
    parts = ["usage: robust-train COMMAND [OPTIONS]"]
    for title, commands in groups.items():
        parts.append(f"\n{title}:")
        parts += [f"  {command.name.ljust(width)}  {command.help}" for command in commands]
    parts.append("\nrobust-train COMMAND --help shows the options of a command;")
    parts.append("robust-train --version shows the version.")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
