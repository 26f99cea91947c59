"""Passes requests from commands to a job, as small files in ``<run folder>/requests/``.

A command writes ``<id>.json`` with ``{"verb": …, "options": {…}}``. The launcher takes ``stop``,
and the attempt takes all other requests: the process renames the file to ``<id>.taken``, writes
``<id>.answer`` with ``{"answer": {…}}`` or ``{"error": "why not"}``, and removes the request. The
command reads and removes the answer. A sweep has two files in its own folder instead, ``stop.json``
and ``limit.json``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robust_train.files import parse_json, read_object, read_small, write_json
from robust_train.gpu.processes import user_name
from robust_train.model.errors import NotDoneError
from robust_train.model.events import Json

log = logging.getLogger("robust_train")

REQUESTS = "requests"
SWEEP_FILE = "sweep.json"
SWEEP_STOP_FILE = "stop.json"
SWEEP_LIMIT_FILE = "limit.json"
LAUNCHERS_VERB = "stop"
NEW = ".json"
TAKEN = ".taken"
ANSWER = ".answer"
_MAX_BYTES = 64 * 1024
_MODE = 0o700

Reply = dict[str, Json]  # `{"answer": {…}}` or `{"error": …}`


class RefusedError(NotDoneError):
    """The request is refused. The message is one line with the reason and the fix."""


@dataclass(frozen=True)
class Request:
    """The content of a request's file."""

    path: Path  # `<id>.json`
    verb: str = ""
    options: Mapping[str, Json] = field(default_factory=dict)

    def take(self) -> bool:
        """Take the request for this process. Return False if it no longer exists."""
        try:
            self.path.rename(self.path.with_suffix(TAKEN))
        except OSError:  # the command has withdrawn it, or another process has taken it
            return False
        return True

    def answer(self, reply: Reply) -> None:
        """Answer the request and remove it. If the disk is full, there is no answer."""
        answer = self.path.with_suffix(ANSWER)
        with contextlib.suppress(OSError):
            write_json(answer, reply)
        for suffix in (NEW, TAKEN):
            with contextlib.suppress(OSError):
                self.path.with_suffix(suffix).unlink()


def open_requests(run_dir: Path) -> None:
    """Create the directory of requests, or remove the files of an earlier launch from it.

    Raises:
        OSError: the directory cannot be created, or belongs to another user.
    """
    folder = run_dir / REQUESTS
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, _MODE)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(1, "not a directory of this user")
    os.chmod(folder, _MODE)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            path.unlink()


def find_requests(run_dir: Path, suffix: str = NEW) -> list[Request]:
    """Return the requests in a run folder, the oldest first.

    A file that is not a request is removed, and gets an error as its answer.

    Args:
        run_dir: the run folder.
        suffix: ``NEW`` for waiting requests, ``TAKEN`` for requests that a process has taken.
    """
    try:
        names = sorted(os.listdir(run_dir / REQUESTS))
    except OSError:
        return []
    requests = [_read(run_dir / REQUESTS / name) for name in names if name.endswith(suffix)]
    return [request for request in requests if request is not None]


def _read(path: Path) -> Request | None:
    request = Request(path.with_suffix(NEW))
    try:
        content = _read_own(path)
        verb = content["verb"]
        options = content.get("options", {})
        if not isinstance(verb, str) or not isinstance(options, dict):
            raise ValueError
        return Request(request.path, verb, options)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, KeyError):
        problem = "that is not a request"
    log.warning("request %s is refused: %s", path, problem)
    request.answer({"error": problem})
    shutil.rmtree(path, ignore_errors=True)  # `answer` removed a file, but not a directory
    return None


def _read_own(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file that belongs to this user or root.

    Raises:
        OSError: the file cannot be read, or belongs to another user.
        ValueError: the file has no JSON object.
    """
    data, status = read_small(path, _MAX_BYTES)
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(1, f"it belongs to user {status.st_uid}")
    content = parse_json(data)
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content


def request_sweep_stop(folder: Path) -> None:
    """Request that a sweep and all its jobs stop.

    Raises:
        RefusedError: the sweep has ended.
    """
    sweep = read_object(folder / SWEEP_FILE)
    if sweep.get("status", "running") != "running":
        raise RefusedError("this sweep has ended")
    content = {"sweep": sweep.get("sweep"), "user": user_name(os.geteuid())}
    write_json(folder / SWEEP_STOP_FILE, content)


def sweep_stop_requested(folder: Path) -> bool:
    """Return whether someone has requested that this launch of a sweep stops.

    A sweep that fails requests its own stop.
    """
    path = folder / SWEEP_STOP_FILE
    try:
        sweep = read_object(folder / SWEEP_FILE)
        return bool(_read_own(path)["sweep"] == sweep.get("sweep"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError) as problem:
        log.warning("%s is not a request to stop (%s) and is removed", path, problem)
        with contextlib.suppress(OSError):
            path.unlink()
        return False


def request_sweep_limit(folder: Path, number: int) -> None:
    """Request that at most ``number`` jobs of a sweep run at once from now on.

    Raises:
        OSError: the request cannot be written.
    """
    write_json(folder / SWEEP_LIMIT_FILE, {"limit": number})


def requested_sweep_limit(folder: Path) -> int | None:
    """Return the requested maximum number of a sweep's jobs at once, None without a request."""
    try:
        number = _read_own(folder / SWEEP_LIMIT_FILE)["limit"]
    except (OSError, ValueError, KeyError):
        return None
    return number if isinstance(number, int) else None


def request_pruning(run_dir: Path, reason: str) -> None:
    """Request that a sweep's job saves a checkpoint and ends as pruned.

    Raises:
        OSError: the request cannot be written.
    """
    path = new_request(run_dir)
    write_json(path, {"verb": LAUNCHERS_VERB, "options": {"pruned": reason}})


def new_request(run_dir: Path) -> Path:
    """Return a path for a new request. Later requests have later names."""
    name = f"{time.time_ns():020}-{os.urandom(4).hex()}{NEW}"
    return run_dir / REQUESTS / name
