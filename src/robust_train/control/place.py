"""The user's own directory in which live runs have their sockets, and how it is opened safely."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from robust_train.files import DirectoryProblem, open_or_make

VARIABLE = "ROBUST_TRAIN_RUNTIME_DIR"
"""Names the only directory to use, in place of the defaults."""

_NAME = "robust-train"
_PRIVATE_MODE = 0o700
_SOCKET_MODE = 0o600
_BACKLOG = 64
_LONGEST_ADDRESS = 107  # sun_path has 108 bytes, one of them for the NUL; see unix(7)
_SOCKET_NAME = re.compile(r"(\d{1,10})-([0-9a-f]{6})\.sock", re.ASCII)


class PlaceProblem(Exception):
    """The directory must not or cannot be used. The message names it, the trouble and a way out."""


@dataclass(frozen=True)
class Place:
    """An opened directory that belongs to this user and is closed to all others.

    Attributes:
        path: for people.
        fd: its descriptor.
    """

    path: Path
    fd: int

    def address(self, name: str) -> str:
        """What to bind or connect a socket to: the path, or a shorter way there if that is too
        long for a socket's address.
        """
        path = str(self.path / name)
        # cleaners of /tmp spare sockets that /proc/net/unix lists under their path
        if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
            return path
        return f"/proc/self/fd/{self.fd}/{name}"

    def names(self) -> list[str]:
        """The names in it that may be sockets of runs."""
        return sorted(name for name in os.listdir(self.fd) if _SOCKET_NAME.fullmatch(name))

    def remove(self, name: str) -> None:
        """Remove a socket's name, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)


def candidates(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where sockets may lie, the best first.

    A run may have been started without the variables of a login (cron, ssh, sudo), and a login's
    own directory goes with its last session while the run stays: so whoever looks for runs looks in
    all of these.
    """
    chosen = environ.get(VARIABLE)
    if chosen:
        return (Path(chosen).expanduser().absolute(),)
    uid = os.geteuid()
    of_the_login = (environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}")
    found = [Path(path).absolute() / _NAME for path in of_the_login if path and _is_mine(path)]
    found.append(Path(f"/tmp/{_NAME}-{uid}"))  # not $TMPDIR: jobs and shells have different ones
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def opened(path: Path, *, make: bool) -> Iterator[Place]:
    """The directory, checked; with ``make`` it is made where it is missing.

    Raises:
        PlaceProblem: it cannot be used, or others could put something into it.
        FileNotFoundError: it is not there and is not to be made.
    """
    if not make and not path.is_dir():
        raise FileNotFoundError(path)
    try:
        fd = open_or_make(path, _PRIVATE_MODE)
    except DirectoryProblem as problem:
        raise _problem(path, str(problem)) from problem
    try:
        _check(fd, path)
        yield Place(path, fd)
    finally:
        os.close(fd)


def listen(environ: Mapping[str, str], name: str) -> tuple[socket.socket, Path]:
    """A listening socket ``name`` in the first directory that can be used, and its path.

    Raises:
        PlaceProblem: none can be.
    """
    problems = []
    for path in candidates(environ):
        try:
            with opened(path, make=True) as place:
                return _listen_in(place, name), path / name
        except (PlaceProblem, OSError) as problem:
            problems.append(str(problem))
    raise PlaceProblem("; ".join(problems))


def parts_of(name: str) -> tuple[int, str]:
    """The process id and the token in a socket's name.

    Raises:
        ValueError: no run has such a socket.
    """
    parts = _SOCKET_NAME.fullmatch(name)
    if parts is None:
        raise ValueError(name)
    return int(parts[1]), parts[2]


def _listen_in(place: Place, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError):
            # the name then has this mode from its first moment, if the umask lets it
            os.fchmod(listener.fileno(), _SOCKET_MODE)
        listener.bind(place.address(name))
        os.chmod(name, _SOCKET_MODE, dir_fd=place.fd)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _problem(place.path, f"takes no socket ({error.strerror})") from error
    return listener


def _is_mine(path: str) -> bool:
    """sudo and su may leave the variable of the user before."""
    try:
        told = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(told.st_mode) and told.st_uid == os.geteuid()


def _check(fd: int, path: Path) -> None:
    told = os.fstat(fd)
    if told.st_uid != os.geteuid():
        raise _problem(path, f"belongs to user {told.st_uid}")
    if stat.S_IMODE(told.st_mode) != _PRIVATE_MODE:
        try:
            os.fchmod(fd, _PRIVATE_MODE)
        except OSError as error:
            raise _problem(path, f"is open to others ({error.strerror})") from error


def _problem(path: Path, trouble: str) -> PlaceProblem:
    return PlaceProblem(
        f"the directory for control sockets {path} {trouble}; name another one with {VARIABLE}"
    )
