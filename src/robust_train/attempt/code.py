"""The user's modules as they were: what an attempt has imported, and whether it has changed since.

``code-as-it-was/index.jsonl`` names each module with its file and digest, as the first attempt of a
launch, or of a sweep, imported it. With ``code=first`` the sources lie beside it, and later
attempts are made of these; all else about a module, ``__file__`` among it, is as on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import linecache
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from robust_train.config.attempt import AttemptRequest, CodePlan
from robust_train.config.trainers import MAIN_MODULE, PROGRAM_FILE
from robust_train.files import LineFile, json_lines, replacing
from robust_train.model.json import from_json

log = logging.getLogger("robust_train")

_INDEX = "index.jsonl"
_OURS = ("robust_train", "hydra_plugins")
_MOST_NAMES = 8


@dataclass(frozen=True)
class _Source:
    """A module as it was imported first; of a program its path is the name."""

    name: str
    path: str
    digest: str
    attempt: int


_HOW_TO_KEEP_IT = "; code=first keeps a job's code as it began"


class Code:
    """Notes which of the user's modules an attempt imports, by its ``plan``."""

    def __init__(
        self,
        plan: CodePlan,
        request: AttemptRequest,
        rank: int,
    ) -> None:
        self._plan, self._request, self._rank = plan, request, rank
        self._known = _read(plan.folder)
        self._seen = set[str]()
        if plan.begins:
            if rank == 0:
                shutil.rmtree(plan.folder, ignore_errors=True)
        elif plan.runs_first:
            sys.meta_path.insert(0, _Finder(plan.folder, self._known))

    def note(self, program: Sequence[str] = ()) -> None:
        """Record what was imported since the last call, and the files of a ``program``; log which
        files are not as they were. A disk that is full costs the record."""
        if self._rank:
            return
        files = {
            name: path
            for name, path in own_modules()
            if name not in self._seen
        }
        files |= {path: path for path in program if PROGRAM_FILE.search(path)}
        self._seen |= files.keys()
        changed: dict[str, int] = {}
        for name, path in files.items():
            with contextlib.suppress(OSError):
                data = Path(path).read_bytes()
                found = _Source(
                    name,
                    path,
                    hashlib.sha256(data).hexdigest(),
                    self._request.attempt,
                )
                known = self._known.get(name)
                if known is not None and known.digest != found.digest:
                    changed[os.path.relpath(path)] = known.attempt
                if self._plan.begins or known is None:
                    self._record(found, data)
        if changed:
            self._log(changed)

    def _record(
        self,
        found: _Source,
        data: bytes,
    ) -> None:
        folder = self._plan.folder
        folder.mkdir(exist_ok=True)
        copy = _copy(folder, found.name)
        # the jobs of a sweep may begin at the same time
        if self._plan.runs_first and not copy.exists():
            with replacing(copy) as temporary:
                temporary.write_bytes(data)
        line = json.dumps(asdict(found)) + "\n"
        LineFile(folder / _INDEX).append(line.encode())

    def _log(self, changed: Mapping[str, int]) -> None:
        names = ", ".join(sorted(changed)[:_MOST_NAMES])
        names += ", …" if len(changed) > _MOST_NAMES else ""
        since = f"changed since attempt {min(changed.values())}: {names}"
        if not self._plan.begins:
            is_script = self._request.config.is_script
            log.warning(
                "attempt %d runs other code; %s%s",
                self._request.attempt,
                since,
                "" if is_script else _HOW_TO_KEEP_IT,
            )
        elif self._request.resume_checkpoint is not None:
            log.warning("this launch runs today's code; %s", since)


class _Finder(MetaPathFinder):
    """Finds modules in the copy."""

    def __init__(
        self,
        folder: Path,
        copies: Mapping[str, _Source],
    ) -> None:
        self._folder, self._copies = folder, copies

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return where a module comes from, None if the copy does not have it."""
        known = self._copies.get(fullname)
        copy = _copy(self._folder, fullname)
        if known is None or not copy.is_file():
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            known.path,
            loader=_Loader(fullname, known.path, copy),
        )


class _Loader(SourceFileLoader):
    """Loads a module from its copy, under the path that it was copied from."""

    def __init__(
        self,
        name: str,
        path: str,
        copy: Path,
    ) -> None:
        super().__init__(name, path)
        self._copy = copy

    def get_data(self, path: str) -> bytes:
        """Return the copy; tracebacks and ``inspect`` show its lines as well."""
        data = self._copy.read_bytes()
        lines = importlib.util.decode_source(data).splitlines(keepends=True)
        linecache.cache[path] = len(data), None, lines, path
        return data

    def path_stats(self, path: str) -> Mapping[str, float]:
        """Have no bytecode read or written, which is that of the file on the disk."""
        raise OSError


def _copy(folder: Path, name: str) -> Path:
    return folder / f"{name}.py"


def _read(folder: Path) -> dict[str, _Source]:
    """Return what was recorded first of each module; nothing of what cannot be read."""
    found: dict[str, _Source] = {}
    with contextlib.suppress(OSError, ValueError):
        for content in filter(None, json_lines(folder / _INDEX)):
            one = from_json(_Source, content)
            found.setdefault(one.name, one)
    return found


def own_modules() -> list[tuple[str, str]]:
    """Return name and file of the imported modules that are the user's, but those from a copy."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        path = str(getattr(module, "__file__", None) or "")
        if (
            # a script has none, and a module that runs by ``python -m`` has its own
            name in (MAIN_MODULE, getattr(spec, "name", None))
            and not isinstance(getattr(module, "__loader__", None), _Loader)
            and path.endswith(".py")
            and name.partition(".")[0] not in _OURS
            and not {"site-packages", "dist-packages"} & set(Path(path).parts)
            and not path.startswith(
                tuple(f"{one}{os.sep}" for one in libraries)
            )
        ):
            found.append((name, path))
    return found
