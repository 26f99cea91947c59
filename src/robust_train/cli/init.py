"""``robust-train init``: copies the project template into a new folder."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

from robust_train.cli.command import Answer, UsageError

_TEMPLATE = Path(__file__).parents[1] / "project_template"


def write_project(arguments: Namespace) -> Answer:
    """Write a new project without overwriting files."""
    folder = Path(arguments.dir)
    files = [path for path in _TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    names = sorted(str(path.relative_to(_TEMPLATE)) for path in files)
    for name in names:
        if os.path.lexists(folder / name):
            raise UsageError(f"{folder / name} exists already; name another folder")
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_TEMPLATE / name, folder / name)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise UsageError(problem) from error
    command = "python main.py"
    if folder != Path():
        command = f"cd {folder} && {command}"
    return Answer(shown=[f"wrote {', '.join(names)}; now: {command}"])
