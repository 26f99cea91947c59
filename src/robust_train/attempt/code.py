"""Records the user's source files, and warns if they have changed since the job started.

:mod:`.interpreter` uses :class:`Code` in the process that trains. The first attempt of a launch
records each imported module in ``code.jsonl``, with its file and digest. For a script it records
the files that its command names. Each later attempt compares its files with the record.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from robust_train.config.attempt import AttemptRequest
from robust_train.config.trainers import MAIN_MODULE, PROGRAM_FILE
from robust_train.files import LineFile, digest_of, json_lines
from robust_train.folder.provenance import CODE_FILE, CONFIG_FILE, LARGEST_SOURCE
from robust_train.model.json import from_json

log = logging.getLogger("robust_train")

_OUR_PACKAGES = ("robust_train", "hydra_plugins")
_MOST_NAMES = 8  # in a warning


@dataclass(frozen=True)
class _Source:
    """A line of ``code.jsonl``: a module or a script's file, when an attempt first used it."""

    name: str  # the module's name, or the path of a script's file
    path: str
    digest: str
    attempt: int  # number of the attempt


class Code:
    """Records the source files that an attempt uses, on rank 0. Other ranks do nothing."""

    def __init__(self, request: AttemptRequest, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._path = request.run_dir / CODE_FILE
        self._recorded = _read_record(self._path)
        self._seen = set[str]()
        if request.is_first and rank == 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def record(self, program: Sequence[str] = ()) -> None:
        """Record the modules that were imported since the last call, and the files of a
        ``program``. Logs a warning about files that have changed."""
        if self._rank:
            return
        files = dict(find_user_modules())
        files |= {path: path for path in program if _is_source(path)}
        # By path of a changed file, the number of the attempt that used another version.
        changed: dict[str, int] = {}
        for name in files.keys() - self._seen:
            path = files[name]
            # A file may be unreadable, and the disk full.
            with contextlib.suppress(OSError):
                digest = digest_of(path, LARGEST_SOURCE)
                source = _Source(name, path, digest, self._request.attempt)
                if self._has_changed(source):
                    changed[os.path.relpath(path)] = self._recorded[name].attempt
                if self._request.is_first or name not in self._recorded:
                    line = json.dumps(asdict(source)) + "\n"
                    LineFile(self._path).append(line.encode())
        self._seen |= files.keys()
        if changed:
            self._log_changes(changed)

    def _has_changed(self, source: _Source) -> bool:
        """Return whether a file differs from its record and the user does not know of it yet."""
        before = self._recorded.get(source.name)
        if before is None or before.digest == source.digest:
            return False
        # The launcher has already compared config files with those of the last launch.
        return not (self._request.is_first and CONFIG_FILE.search(source.path))

    def _log_changes(self, changed: Mapping[str, int]) -> None:
        names = ", ".join(sorted(changed)[:_MOST_NAMES])
        if len(changed) > _MOST_NAMES:
            names += ", …"
        since = f"changed since attempt {min(changed.values())}: {names}"
        if not self._request.is_first:
            log.warning("attempt %d runs other code; %s", self._request.attempt, since)
        elif self._request.resume_checkpoint is not None:
            log.warning("this launch runs today's code; %s", since)


def _is_source(path: str) -> bool:
    """Return whether a word of a script's command is the path of a source or config file."""
    return bool(PROGRAM_FILE.search(path) or CONFIG_FILE.search(path))


def _read_record(file: Path) -> dict[str, _Source]:
    """Return the first record of each module, empty if the file cannot be read."""
    sources: dict[str, _Source] = {}
    with contextlib.suppress(OSError, ValueError):
        for content in filter(None, json_lines(file)):
            source = from_json(_Source, content)
            sources.setdefault(source.name, source)
    return sources


def find_user_modules() -> list[tuple[str, str]]:
    """Return name and file of the imported modules that belong to the user."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    library_folders = tuple(f"{library}{os.sep}" for library in libraries)
    modules = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        path = str(getattr(module, "__file__", None) or "")
        # A module that runs as a script has no spec, and with ``python -m`` a spec of another name.
        is_import = name in (MAIN_MODULE, getattr(spec, "name", None))
        is_ours = name.partition(".")[0] in _OUR_PACKAGES
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
        is_of_python = path.startswith(library_folders)
        if is_import and path.endswith(".py") and not (is_ours or is_installed or is_of_python):
            modules.append((name, path))
    return modules
