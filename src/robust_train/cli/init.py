"""``robust-train init DIR``: a new project that trains at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.output import Parser, fail
from robust_train.errors import EXIT_BAD_CONFIG

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_TEMPLATE = "project_template"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the project; return the exit code. 2: something of it is there already."""
    parser = Parser(
        prog="robust-train init",
        description="Write a minimal project: config, trainer, justfile, README.",
    )
    parser.add_argument("dir", type=Path, help="where; made if need be, nothing is overwritten")
    folder: Path = parser.parse_args(argv).dir
    contents = dict(_files(files("robust_train") / _TEMPLATE))
    taken = sorted(str(folder / name) for name in contents if os.path.lexists(folder / name))
    if taken:
        problem = f"{taken[0]} exists already; name another folder"
        return fail(f"init {folder}", problem, code=EXIT_BAD_CONFIG)
    try:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:  # never over a file that came meanwhile
                file.write(content)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        return fail(f"init {folder}", problem, code=EXIT_BAD_CONFIG)
    print(f"wrote {', '.join(sorted(contents))}; now: cd {folder} && python main.py")
    return 0


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.name == "__pycache__":
            continue
        if item.is_dir():
            yield from _files(item, f"{prefix}{item.name}/")
        else:
            yield f"{prefix}{item.name}", item.read_bytes()
