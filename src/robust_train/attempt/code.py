"""Whether the user's source files have changed since the job started.

The attempt's process records each module with its file and digest in ``code.jsonl``, as the first
attempt of a launch imported it. For a script it records the files that its command names.
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

_OURS = ("robust_train", "hydra_plugins")
_MOST_NAMES = 8


@dataclass(frozen=True)
class _Source:
    """A module as it was first imported. A script's file has its path as its name."""

    name: str
    path: str
    digest: str
    attempt: int


class Code:
    """Notes the user's source files that an attempt consists of."""

    def __init__(self, request: AttemptRequest, rank: int) -> None:
        self._request = request
        self._rank = rank
        self._path = request.run_dir / CODE_FILE
        self._known = _read(self._path)
        self._seen = set[str]()
        if request.is_first and rank == 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def note(self, program: Sequence[str] = ()) -> None:
        """Record the files of a ``program`` and the modules that were imported since the last call,
        and log which files have changed. A full disk costs the record."""
        if self._rank:
            return
        files = dict(own_modules()) | {
            path: path for path in program if PROGRAM_FILE.search(path) or CONFIG_FILE.search(path)
        }
        is_first = self._request.is_first
        changed: dict[str, int] = {}
        for name in files.keys() - self._seen:
            path = files[name]
            with contextlib.suppress(OSError):
                digest = digest_of(path, LARGEST_SOURCE)
                source = _Source(name, path, digest, self._request.attempt)
                before = self._known.get(name)
                # The launcher has already compared config files with those of the last launch.
                is_compared = is_first and bool(CONFIG_FILE.search(path))
                if before is not None and before.digest != source.digest and not is_compared:
                    changed[os.path.relpath(path)] = before.attempt
                if is_first or before is None:
                    line = json.dumps(asdict(source)) + "\n"
                    LineFile(self._path).append(line.encode())
        self._seen |= files.keys()
        if changed:
            self._log(changed)

    def _log(self, changed: Mapping[str, int]) -> None:
        names = ", ".join(sorted(changed)[:_MOST_NAMES])
        names += ", …" if len(changed) > _MOST_NAMES else ""
        since = f"changed since attempt {min(changed.values())}: {names}"
        if not self._request.is_first:
            text = "attempt %d runs other code; %s"
            log.warning(text, self._request.attempt, since)
        elif self._request.resume_checkpoint is not None:
            log.warning("this launch runs today's code; %s", since)


def _read(file: Path) -> dict[str, _Source]:
    """Return the first record of each module; skip files that cannot be read."""
    sources: dict[str, _Source] = {}
    with contextlib.suppress(OSError, ValueError):
        for content in filter(None, json_lines(file)):
            source = from_json(_Source, content)
            sources.setdefault(source.name, source)
    return sources


def own_modules() -> list[tuple[str, str]]:
    """Return name and file of the imported modules that belong to the user."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    modules = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        path = str(getattr(module, "__file__", None) or "")
        if (
            # A script has no spec, and a module that runs by ``python -m`` has its own name in it.
            name in (MAIN_MODULE, getattr(spec, "name", None))
            and path.endswith(".py")
            and name.partition(".")[0] not in _OURS
            and not {"site-packages", "dist-packages"} & set(Path(path).parts)
            and not path.startswith(tuple(f"{library}{os.sep}" for library in libraries))
        ):
            modules.append((name, path))
    return modules
