"""Requests to a job: one small file each in ``<run folder>/requests/``.

A client writes ``<id>.json``: ``{"verb": …, "options": {…}}``. Whoever takes it renames it to
``<id>.taken``, writes ``<id>.answer``, ``{"answer": {…}}`` or ``{"error": "why not"}``, and removes
it; the client removes the answer. The launcher takes ``stop``, the attempt all else. A request
whose file belongs to another user is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_train.files import parse_json, read_small, replacing
from robust_train.runfolder.lock import user_name

log = logging.getLogger("robust_train")

REQUESTS = "requests"
SWEEP_STOP_FILE = "stop.json"
LAUNCHERS_VERB = "stop"
NEW, TAKEN, ANSWER = ".json", ".taken", ".answer"
_MAX_BYTES = 64 * 1024
_MODE = 0o700

Reply = dict[str, Any]
"""``{"answer": {…}}`` or ``{"error": …}``."""


class Refused(Exception):
    """The request is not carried out: why, and what would help, in one line."""


@dataclass(frozen=True)
class Request:
    """A request as its file has it."""

    id: str
    verb: str
    options: Mapping[str, Any]


class Inbox:
    """The requests in one run folder, as the job sees them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / REQUESTS
        self._ignored: set[str] = set()

    def open(self) -> None:
        """Make the directory, or clear what an earlier launch left in it.

        Raises:
            OSError: it cannot be made, or is another user's.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, _MODE)
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(1, "no directory of this user's")
        os.chmod(self.path, _MODE)
        for name in os.listdir(self.path):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def requests(self, suffix: str = NEW) -> list[Request]:
        """Return the requests that wait (or were taken), the oldest first."""
        try:
            names = sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except OSError:
            return []
        found = [self._read(name) for name in names if name not in self._ignored]
        return [request for request in found if request is not None]

    def take(self, request: Request) -> bool:
        """Return whether the request is this process's to carry out from now on."""
        try:
            (self.path / f"{request.id}{NEW}").rename(self.path / f"{request.id}{TAKEN}")
        except OSError:  # withdrawn
            return False
        return True

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request and remove it. A full disk loses the answer."""
        with contextlib.suppress(OSError), replacing(self.path / f"{request.id}{ANSWER}") as file:
            file.write_text(json.dumps(reply, default=repr))
        for suffix in (NEW, TAKEN):
            with contextlib.suppress(OSError):
                (self.path / f"{request.id}{suffix}").unlink()

    def _read(self, name: str) -> Request | None:
        request_id = name.rpartition(".")[0]
        try:
            data = _read_own(self.path / name)
            verb, options = data["verb"], data.get("options", {})
            if not isinstance(verb, str) or not isinstance(options, dict):
                raise ValueError
            return Request(request_id, verb, options)
        except FileNotFoundError:
            return None
        except OSError as error:
            problem = error.strerror
        except (ValueError, KeyError):
            problem = "that is no request"
        log.warning("request %s in %s is refused: %s", name, self.path, problem)
        self.answer(Request(request_id, "", {}), {"error": str(problem)})
        if os.path.lexists(self.path / name):
            self._ignored.add(name)
        return None


def _read_own(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of this user's, or of root's.

    Raises:
        OSError: it cannot be read, or belongs to another user.
        ValueError: it is no JSON object.
    """
    data, owner = read_small(path, _MAX_BYTES)
    if owner not in (os.geteuid(), 0):
        raise PermissionError(1, f"it belongs to user {owner}")
    found = parse_json(data)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def request_sweep_stop(folder: Path) -> None:
    """Ask a sweep and all its jobs to stop.

    Raises:
        Refused: it has ended.
        OSError: the sweep folder cannot be written to.
    """
    sweep = _sweep(folder)
    if sweep.get("status", "running") != "running":
        raise Refused("this sweep has ended")
    with replacing(folder / SWEEP_STOP_FILE) as temporary:
        temporary.write_text(json.dumps({"sweep": sweep.get("sweep"), "user": user_name()}) + "\n")


def sweep_stop_requested(folder: Path) -> bool:
    """Return whether ``robust-train run stop`` was run for this launch of the sweep."""
    path = folder / SWEEP_STOP_FILE
    try:
        return bool(_read_own(path)["sweep"] == _sweep(folder).get("sweep"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError) as problem:
        log.warning("%s is not a request to stop (%s) and is removed", path, problem)
        with contextlib.suppress(OSError):
            path.unlink()
        return False


def _sweep(folder: Path) -> dict[str, Any]:
    """Return the content of ``sweep.json``; empty where it cannot be read."""
    try:
        found = parse_json(read_small(folder / "sweep.json", 1 << 26)[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
