"""Reads which files a launch used, and finds the files that have changed since.

The feature ``provenance`` writes ``environment.json`` and ``code.jsonl`` in the launcher. The next
launch of the job uses this module to compare them with its own files, and commands use it to show
them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from robust_train.files import digest_of, json_lines, read_object
from robust_train.model.events import Json

FILE = "environment.json"
CODE_FILE = "code.jsonl"
CONFIG_FILE = re.compile(r"\.(ya?ml|json|toml|ini|cfg)$")
_LARGEST_CONFIG_FILE = 1 << 20
LARGEST_SOURCE = 1 << 24
SHORT = ("host", "python", "torch", "cuda", "driver", "git_commit", "git_dirty")


def read_environment(run_dir: Path) -> dict[str, Json]:
    """Return the content of ``environment.json``, empty if it cannot be read."""
    return read_object(run_dir / FILE)


def in_words(content: Mapping[str, Json]) -> dict[str, str]:
    """Return the short form of ``environment.json`` for people."""
    gpus = content.get("gpus")
    listed = gpus if isinstance(gpus, list) else []
    names = [str(gpu.get("name")) for gpu in listed if isinstance(gpu, dict)]
    words: dict[str, Json] = {"gpu": ", ".join(names)}
    words |= {name: content.get(name) for name in SHORT}
    return {name.replace("_", " "): str(value) for name, value in words.items() if value}


def config_digests(composed: Sequence[Path], command: Sequence[str] = ()) -> dict[str, Json]:
    """Return the digests of a job's config files by path.

    Args:
        composed: the files from which the config was composed.
        command: the job's command line. Config files that it names are included.
    """
    named = [Path(word.rpartition("=")[2]) for word in command]
    named = [path for path in named if CONFIG_FILE.search(path.name)]
    digests: dict[str, Json] = {}
    for path in (*composed, *named):
        # A large file is data, and a word of the command need not be a file.
        with contextlib.suppress(OSError, ValueError):
            path = path.resolve()
            digests[str(path)] = digest_of(path, _LARGEST_CONFIG_FILE)
    return digests


def changed_files(before: Mapping[str, Json], digests: Mapping[str, Json]) -> list[str]:
    """Return the config files that have changed since an earlier launch.

    Args:
        before: the content of the earlier launch's ``environment.json``.
        digests: the digests of the current files, from `config_digests`.
    """
    earlier = before.get("config_files")
    if not isinstance(earlier, dict):
        return []
    return [
        os.path.relpath(path)
        for path, digest in digests.items()
        if earlier.get(path, digest) != digest
    ]


def changed_sources(run_dir: Path) -> list[str]:
    """Return the code and config files that have changed since this folder's last launch.

    Files that cannot be read now are left out.
    """
    digests: dict[str, Json] = {}
    config_files = read_environment(run_dir).get("config_files")
    if isinstance(config_files, dict):
        digests |= config_files
    with contextlib.suppress(OSError):
        for content in json_lines(run_dir / CODE_FILE):
            if content:
                digests.setdefault(str(content.get("path")), content.get("digest"))
    changed = []
    for path, digest in digests.items():
        with contextlib.suppress(OSError, ValueError):
            if digest_of(path, LARGEST_SOURCE) != digest:
                changed.append(os.path.relpath(path))
    return sorted(changed)
