"""``robust-train report``: make ``report.html`` anew from what a run or sweep folder holds."""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli.parser import Parser
from robust_train.report.html import FILE_NAME, job_page, save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.page import is_sweep, sweep_page, sweep_story_of

EXIT_NOT_WRITTEN = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, or print the data behind it; returns the exit code.

    0: done. 1: the report could not be written. 2: PATH is no run folder and no sweep folder.
    """
    parser = Parser(
        prog="robust-train report",
        description="Make report.html of a run or a sweep from its journals: while it runs, after "
        "its end, and of one that died.",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a run folder, a sweep folder, or a file in one"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--json", action="store_true", help="print the data instead, for programs")
    parser.add_argument(
        "--output", metavar="FILE", help="where to write it, PATH/report.html if not"
    )
    arguments = parser.parse_args(argv)
    folder = Path(arguments.path)
    if folder.is_file():
        folder = folder.parent
    problem = _problem(folder)
    if problem is not None:
        print(f"robust-train report {arguments.path}: {problem}", file=sys.stderr)
        return EXIT_USAGE
    if arguments.json:
        data = sweep_story_of(folder) if is_sweep(folder) else story_of(read_sources(folder))
        print(json.dumps(data.as_json(), ensure_ascii=False, default=str))
        return 0
    target = Path(arguments.output) if arguments.output else folder / FILE_NAME
    try:
        _write(folder, target)
    except OSError as error:
        print(f"robust-train report: cannot write {target}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_WRITTEN
    print(target)
    if arguments.open and not webbrowser.open(target.resolve().as_uri()):
        print("robust-train report --open: no browser was found here", file=sys.stderr)
    return 0


def _problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / "journal.jsonl").exists() or (folder / "summary.json").exists():
        return None
    if is_sweep(folder):
        return None
    return "neither a run folder (with journal.jsonl) nor a sweep folder (with jobs' folders)"


def _write(folder: Path, target: Path) -> None:
    """The page, and for a sweep that of each job.

    Raises:
        OSError: the page itself cannot be written.
    """
    if not is_sweep(folder):
        save(target, job_page(story_of(read_sources(folder))))
        return
    story = sweep_story_of(folder)
    for job in story.jobs:
        if job.story is None:
            continue
        try:
            save(Path(job.story.folder) / FILE_NAME, job_page(job.story))
        except OSError as error:
            print(f"warning: {job.story.folder}: {error.strerror}", file=sys.stderr)
    save(target, sweep_page(sweep_story_of(folder)))
