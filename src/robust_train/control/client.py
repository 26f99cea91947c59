"""Finding the caller's live runs and asking them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robust_train.control import place
from robust_train.control.protocol import (
    MOST_REPLY_BYTES,
    USUAL_WAIT_SECONDS,
    Reply,
    decode,
    encode,
    own_user_name,
    peer_uid,
)

_WHO_SECONDS = 2.0
_GRACE_SECONDS = 5.0
_STARTING_SECONDS = 60.0
_PAUSE_SECONDS = 0.02


class NoLiveRun(Exception):
    """There is no such run, or more than one: one line that says which there are."""


class ControlError(Exception):
    """The run did not do it: one line that says why."""


class StillQueued(ControlError):
    """The run has not done it so far, but will."""


@dataclass(frozen=True)
class LiveRun:
    """A launcher of the caller's that runs now.

    Attributes:
        id: the job's id in ``robust-train queue``, or ``0-…`` for one that never stood in line.
        pid: of the launcher.
        user: its owner's name.
        run_dir: its run folder; empty where it does not answer.
        state: ``starting``, ``waiting``, ``running``, ``between attempts``, ``stopping``, or
            ``does not answer``.
        socket_path: how to reach it.
        about: all that it says of itself.
    """

    id: str
    pid: int
    user: str
    run_dir: Path
    state: str
    socket_path: Path
    about: Mapping[str, Any] = field(default_factory=dict)


def find_live_runs(environ: Mapping[str, str] = os.environ) -> list[LiveRun]:
    """The caller's live runs, the oldest first; what dead ones left is removed."""
    runs: list[LiveRun] = []
    for path in place.candidates(environ):
        try:
            with place.opened(path, make=False) as there:
                for name in there.names():
                    run = _look_at(there, name)
                    if run is not None:
                        runs.append(run)
        except (place.PlaceProblem, OSError):
            continue  # no run of the caller's can be there
    return sorted(runs, key=lambda run: (run.about.get("started", 0.0), run.id))


def choose_run(which: str | None, environ: Mapping[str, str] = os.environ) -> LiveRun:
    """The run that is meant.

    Args:
        which: its id, its run folder or a path inside, a process id (the launcher's or the
            attempt's); None: the only one there is.
        environ: says where to look.

    Raises:
        NoLiveRun: none is meant by that, or more than one.
    """
    runs = find_live_runs(environ)
    if which is None:
        if not runs:
            raise NoLiveRun("no run of yours is alive on this machine")
        if len(runs) > 1:
            raise NoLiveRun(
                f"{len(runs)} runs of yours are alive; name one with --run: {_list(runs)}"
            )
        return runs[0]
    found = [run for run in runs if _is_meant(run, which)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoLiveRun(
            f"--run {which} means {len(found)} runs: {_list(found)}; name one by its id"
        )
    alive = f"alive are {_list(runs)}" if runs else "none is alive on this machine"
    raise NoLiveRun(f"--run {which}: no live run of yours has that id, folder or pid; {alive}")


def ask(
    run: LiveRun, verb: str, *, wait_seconds: float = USUAL_WAIT_SECONDS, **options: Any
) -> dict[str, Any]:
    """Have the run do something, and return what it answers.

    Args:
        run: from :func:`choose_run` or :func:`find_live_runs`.
        verb: what to do.
        wait_seconds: for a step to end, where that is needed.
        options: of the verb.

    Raises:
        StillQueued: no step has ended in time; the run does it when one does.
        ControlError: the run refuses, is gone, or does not answer.
    """
    request = {"verb": verb, "options": options, "wait": wait_seconds}
    try:
        with place.opened(run.socket_path.parent, make=False) as there:
            reply = _exchange(there, run.socket_path.name, request, wait_seconds + _GRACE_SECONDS)
    except TimeoutError as error:
        raise ControlError(
            f"{run.id} does not answer (pid {run.pid}; is it stopped with Ctrl-Z?)"
        ) from error
    except (OSError, ValueError, place.PlaceProblem) as error:
        raise ControlError(f"{run.id} has ended, or ends right now") from error
    if "queued" in reply:
        raise StillQueued(f"{run.id}: {reply['queued']}")
    if "error" in reply:
        raise ControlError(f"{run.id}: {reply['error']}")
    answer: dict[str, Any] = reply["answer"]
    return answer


def _look_at(there: place.Place, name: str) -> LiveRun | None:
    """The run behind a socket, None where there is none any more."""
    pid, token = place.parts_of(name)
    path = there.path / name
    try:
        reply = _exchange(there, name, {"verb": "who"}, _WHO_SECONDS)
        about = reply["answer"]
        return LiveRun(
            id=str(about["id"]),
            pid=int(about["pid"]),
            user=str(about["user"]),
            run_dir=Path(about["run_dir"]),
            state=str(about["state"]),
            socket_path=path,
            about=about,
        )
    except ConnectionRefusedError:
        _remove_stale(there, name, pid)
        return None
    except TimeoutError:
        return LiveRun(f"0-{token}", pid, own_user_name(), Path(), "does not answer", path)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it ended under our eyes


def _remove_stale(there: place.Place, name: str, pid: int) -> None:
    """A socket that nobody listens at: its run is dead, unless it is just being made."""
    with contextlib.suppress(OSError):
        told = os.stat(name, dir_fd=there.fd, follow_symlinks=False)
        if not Path(f"/proc/{pid}").exists() or time.time() - told.st_mtime > _STARTING_SECONDS:
            there.remove(name)


def _exchange(
    there: place.Place, name: str, request: dict[str, Any], timeout_seconds: float
) -> Reply:
    """One request and its reply.

    Raises:
        OSError: nobody is there, or no answer comes in time (TimeoutError).
        ValueError: it is no reply.
    """
    until = time.monotonic() + timeout_seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(timeout_seconds)
        _connect(channel, there.address(name), until)
        if peer_uid(channel) != os.geteuid():
            raise ValueError("another user's socket")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.sendall(encode(request))  # who is not let in is told so before it has asked
        return decode(b"".join(_until_end(channel, until)))


def _connect(channel: socket.socket, address: str, until: float) -> None:
    while True:
        try:
            channel.connect(address)
            return
        except BlockingIOError:  # so many others wait that the kernel takes no more; see unix(7)
            if time.monotonic() >= until:
                raise TimeoutError from None
            time.sleep(_PAUSE_SECONDS)


def _until_end(channel: socket.socket, until: float) -> Iterator[bytes]:
    size = 0
    while size <= MOST_REPLY_BYTES:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        try:
            data = channel.recv(1 << 16)
        except ConnectionResetError:  # the run ended the connection before it read the request
            data = b""
        if not data:
            return
        size += len(data)
        yield data
    raise ValueError("too long")


def _is_meant(run: LiveRun, which: str) -> bool:
    about = run.about
    if which.isdigit():
        return int(which) in (run.pid, about.get("attempt_pid"))
    if which == run.id or which in about.get("earlier_ids", ()):
        return True
    folder = Path(which).expanduser().resolve()
    return bool(about) and (folder == run.run_dir or run.run_dir in folder.parents)


def _list(runs: list[LiveRun]) -> str:
    return ", ".join(f"{run.id} ({run.run_dir if run.about else run.state})" for run in runs)
