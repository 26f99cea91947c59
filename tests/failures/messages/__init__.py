"""A labelled table of failures as libraries word them, and how to read it.

Each ``.txt`` file holds messages under a line that says what kind of failure it is, who raised it
(a class, or ``exit`` and the return code of a process whose output it is), and where it is from.
A clue may follow the kind, as in ``interrupted:killed``::

    === device_oom | torch.OutOfMemoryError | torch 2.5
    CUDA out of memory. Tried to allocate 20.00 MiB. …

A source with a number is an issue that quotes the message; any other names the library, and the
version where the wording is that of a version.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from pathlib import Path

# what classes of libraries that are not here derive from
_BASES: dict[str, type[Exception]] = {
    "ArrowInvalid": ValueError,
    "ArrowMemoryError": MemoryError,
    "BrokenProcessPool": RuntimeError,
    "JSONDecodeError": ValueError,
    "UnidentifiedImageError": OSError,
    "_ArrayMemoryError": MemoryError,
}
_RUNTIME_ERRORS = re.compile(r"^(?:torch|jax|jaxlib|c10|triton|cupy)\b")
_HEADER = re.compile(r"^=== (\w+(?::\w+)?) \| (\S+(?: -?\d+)?) \| (.+)$")
_ERRNO = re.compile(r"\[Errno (\d+)\] ([^:]*?)(?:: '([^']*)')?$")


@dataclass(frozen=True)
class Case:
    """One labelled failure.

    Attributes:
        kind: what it is.
        clue: what else it shows, empty where that is not said.
        raised_by: class of the exception with its module, or ``exit <return code>``.
        source: where it was met.
        message: what the exception, or the process, said.
        file: the file it is in, for names of tests.
        line: its line there.
    """

    kind: str
    clue: str
    raised_by: str
    source: str
    message: str
    file: str
    line: int

    @property
    def is_exit(self) -> bool:
        """Whether this is the output of a process."""
        return self.raised_by.startswith("exit ")

    @property
    def returncode(self) -> int:
        """Of the process."""
        return int(self.raised_by.removeprefix("exit "))

    def exception(self) -> BaseException:
        """The exception as it was raised, of a class of the same name."""
        return raised(self.raised_by, self.message)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def raised(name: str, message: str) -> BaseException:
    """An exception of the class of that name, without the library that it is from."""
    module, _, bare = name.partition("(")[0].rpartition(".")
    known = getattr(builtins, bare, None)
    if not module and isinstance(known, type):
        errno = _ERRNO.match(message)
        if issubclass(known, OSError) and errno is not None:
            number, text, path = errno.groups()
            return known(int(number), text, *([path] if path else []))
        if known is SystemExit:
            return SystemExit(int(message))
        return known(*([message] if message else []))
    base = known if isinstance(known, type) else _BASES.get(bare, Exception)
    if base is Exception and (_RUNTIME_ERRORS.match(module) or bare == "OutOfMemoryError"):
        base = RuntimeError
    made: type[BaseException] = type(bare, (base,), {"__module__": module})
    return made(*([message] if message else []))


def read_cases(path: Path) -> list[Case]:
    """All messages of one file."""
    cases: list[Case] = []
    header: tuple[int, re.Match[str]] | None = None
    message: list[str] = []

    def end() -> None:
        if header is not None:
            line, match = header
            kind, raised_by, source = match.groups()
            text = "\n".join(message)
            kind, _, clue = kind.partition(":")
            cases.append(Case(kind, clue, raised_by, source, text, path.stem, line))

    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _HEADER.match(line)
        if match is None:
            if line.startswith("=== "):
                raise ValueError(f"{path}:{number}: not a header: {line}")
            message.append(line)
            continue
        end()
        header, message = (number, match), []
    end()
    return cases


CASES: tuple[Case, ...] = tuple(
    case for path in sorted(Path(__file__).parent.glob("*.txt")) for case in read_cases(path)
)
