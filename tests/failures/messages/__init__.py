"""A labelled table of failures as libraries word them, and how to read it.

Each ``.txt`` file holds messages under a line that says what kind of failure it is, who raised it
(a class, or ``exit`` and the return code of a process whose output it is), and where it is from.
A clue may follow the kind, as in ``interrupted:killed``::

    === device_oom | torch.OutOfMemoryError | torch 2.5
    CUDA out of memory. Tried to allocate 20.00 MiB. …

A source with a number is an issue that quotes the message; any other names the library, and the
version where the wording is that of a version.
"""

import builtins
import re
from dataclasses import dataclass
from pathlib import Path

# what classes of libraries that are not here derive from
_BASES = {
    "ArrowInvalid": ValueError,
    "ArrowMemoryError": MemoryError,
    "BrokenProcessPool": RuntimeError,
    "JSONDecodeError": ValueError,
    "UnidentifiedImageError": OSError,
    "_ArrayMemoryError": MemoryError,
}
_RUNTIME_ERRORS = re.compile(r"^(?:torch|jax|jaxlib|c10|triton|cupy)\b")
_HEADER = re.compile(r"^=== (\w+)(?::(\w+))? \| (\S+(?: -?\d+)?) \| .+\n", re.MULTILINE)
_ERRNO = re.compile(r"\[Errno (\d+)\] ([^:]*?)(?:: '([^']*)')?$")


@dataclass(frozen=True)
class Case:
    """One labelled failure; the clue is empty where it is not said."""

    kind: str
    clue: str
    raised_by: str
    message: str
    place: str

    @property
    def is_exit(self):
        """Whether this is the output of a process."""
        return self.raised_by.startswith("exit ")

    @property
    def returncode(self):
        """The exit code of the process."""
        return int(self.raised_by.removeprefix("exit "))

    def exception(self):
        """The exception as it was raised, of a class of the same name."""
        return raised(self.raised_by, self.message)

    def __str__(self):
        return self.place


def raised(name, message):
    """An exception of the class of that name, without the library that it is from."""
    module, _, bare = name.partition("(")[0].rpartition(".")
    built_in = getattr(builtins, bare, None)
    if not module and isinstance(built_in, type):
        errno = _ERRNO.match(message)
        if issubclass(built_in, OSError) and errno is not None:
            number, text, path = errno.groups()
            return built_in(int(number), text, *([path] if path else []))
        if built_in is SystemExit:
            return SystemExit(int(message))
        return built_in(*([message] if message else []))
    base = built_in if isinstance(built_in, type) else _BASES.get(bare, Exception)
    if base is Exception and (_RUNTIME_ERRORS.match(module) or bare == "OutOfMemoryError"):
        base = RuntimeError
    made = type(bare, (base,), {"__module__": module})
    return made(*([message] if message else []))


def read_cases(path):
    """All messages of one file."""
    before, *parts = _HEADER.split(path.read_text(encoding="utf-8"))
    cases = []
    for kind, clue, raised_by, text in zip(*(parts[n::4] for n in range(4)), strict=True):
        place = f"{path.name}, message {len(cases) + 1}"
        if before or re.search("^=== ", text, re.MULTILINE):
            raise ValueError(f"{place}: a line that begins with === is no header")
        cases.append(Case(kind, clue or "", raised_by, text.removesuffix("\n"), place))
    return cases


CASES = tuple(
    case for path in sorted(Path(__file__).parent.glob("*.txt")) for case in read_cases(path)
)
