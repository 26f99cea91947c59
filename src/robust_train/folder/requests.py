"""Requests to a job: a small file each in ``<run folder>/requests/``.

A client writes ``<id>.json``: ``{"verb": …, "options": {…}}``. The process that takes it renames it
to ``<id>.taken``, writes ``<id>.answer``, ``{"answer": {…}}`` or ``{"error": "why not"}``, and
removes the request. The client removes the answer. The launcher takes ``stop``, the attempt all
other requests. A sweep has single files instead, ``stop.json`` and ``limit.json`` in its folder.
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
    """The request is not carried out. The message gives the reason and the fix, in one line."""


@dataclass(frozen=True)
class Request:
    """A request as its file ``path`` (``<id>.json``) has it."""

    path: Path
    verb: str = ""
    options: Mapping[str, Json] = field(default_factory=dict)

    def take(self) -> bool:
        """Return whether the request is this process's to carry out from now on."""
        try:
            self.path.rename(self.path.with_suffix(TAKEN))
        except OSError:  # withdrawn
            return False
        return True

    def answer(self, reply: Reply) -> None:
        """Answer the request and remove it. A full disk loses the answer."""
        answer = self.path.with_suffix(ANSWER)
        with contextlib.suppress(OSError):
            write_json(answer, reply)
        for suffix in (NEW, TAKEN):
            with contextlib.suppress(OSError):
                self.path.with_suffix(suffix).unlink()


def open_requests(run_dir: Path) -> None:
    """Create the directory of requests, or clear the files of an earlier launch from it. Raises
    OSError if it cannot be created or belongs to another user."""
    folder = run_dir / REQUESTS
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, _MODE)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(1, "no directory of this user's")
    os.chmod(folder, _MODE)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            path.unlink()


def find_requests(run_dir: Path, suffix: str = NEW) -> list[Request]:
    """Return the requests that wait (or were taken), the oldest first. Files that are not requests
    get an error as answer."""
    try:
        names = sorted(os.listdir(run_dir / REQUESTS))
    except OSError:
        return []
    paths = [run_dir / REQUESTS / name for name in names if name.endswith(suffix)]
    return [request for request in map(_read, paths) if request is not None]


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
    shutil.rmtree(path, ignore_errors=True)  # It may be a directory.
    return None


def _read_own(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file that belongs to this user or root. Raises OSError or
    ValueError."""
    data, status = read_small(path, _MAX_BYTES)
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(1, f"it belongs to user {status.st_uid}")
    content = parse_json(data)
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content


def request_sweep_stop(folder: Path) -> None:
    """Request that a sweep and all its jobs stop. Raises RefusedError if it has ended."""
    sweep = read_object(folder / SWEEP_FILE)
    if sweep.get("status", "running") != "running":
        raise RefusedError("this sweep has ended")
    content = {"sweep": sweep.get("sweep"), "user": user_name(os.geteuid())}
    write_json(folder / SWEEP_STOP_FILE, content)


def sweep_stop_requested(folder: Path) -> bool:
    """Return whether this launch of the sweep was stopped, by someone or its own failure."""
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
    """Return how many jobs of a sweep may run at once, or None if no one has changed that."""
    try:
        number = _read_own(folder / SWEEP_LIMIT_FILE)["limit"]
    except (OSError, ValueError, KeyError):
        return None
    return number if isinstance(number, int) else None


def request_pruning(run_dir: Path, reason: str) -> None:
    """Request that a sweep's job saves a checkpoint and ends as pruned. Raises OSError if the
    request cannot be written."""
    path = new_request(run_dir)
    write_json(path, {"verb": LAUNCHERS_VERB, "options": {"pruned": reason}})


def new_request(run_dir: Path) -> Path:
    """Return the file of a request that is about to be made."""
    name = f"{time.time_ns():020}-{os.urandom(4).hex()}{NEW}"
    return run_dir / REQUESTS / name
