"""``robust-train report``: make ``report.html`` anew from what a run or sweep folder holds."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from robust_train.cli.output import EXIT_NOT_DONE, Parser, fail
from robust_train.errors import EXIT_BAD_CONFIG
from robust_train.report.html import FILE_NAME, job_page, save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.page import is_sweep, sweep_page, sweep_story_of


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, or print the data behind it; return the exit code. 0: done. 1: the report
    could not be written. 2: PATH is no run folder and no sweep folder."""
    parser = Parser(
        prog="robust-train report",
        description="Make report.html of a run or a sweep from its journals: while it runs, after "
        "its end, and of one that died.",
    )
    path = "a run folder, a sweep folder, or a file in one"
    parser.add_argument("path", metavar="PATH", help=path)
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--json", action="store_true", help="print the data instead, for programs")
    output = "where to write it, PATH/report.html if not"
    parser.add_argument("--output", metavar="FILE", help=output)
    arguments = parser.parse_args(argv)
    folder = Path(arguments.path)
    if os.path.isfile(folder):
        folder = folder.parent
    problem = _problem(folder)
    if problem is not None:
        return fail(f"report {arguments.path}", problem, code=EXIT_BAD_CONFIG)
    if arguments.json:
        data = sweep_story_of(folder) if is_sweep(folder) else story_of(read_sources(folder))
        print(json.dumps(data.as_json(), default=str))
        return 0
    target = Path(arguments.output) if arguments.output else folder / FILE_NAME
    try:
        _write(folder, target)
    except OSError as error:
        return fail("report", f"cannot write {target}: {error.strerror}", code=EXIT_NOT_DONE)
    print(target)
    if arguments.open and not webbrowser.open(target.resolve().as_uri()):
        print("robust-train report --open: no browser was found here", file=sys.stderr)
    return 0


def _problem(folder: Path) -> str | None:
    if not os.path.isdir(folder):
        return "there is no such folder"
    if any(os.path.exists(folder / name) for name in ("journal.jsonl", "summary.json")):
        return None
    if is_sweep(folder):
        return None
    return "neither a run folder (with journal.jsonl) nor a sweep folder (with jobs' folders)"


def _write(folder: Path, target: Path) -> None:
    """Write the page, and for a sweep that of each job; OSError if the page itself cannot be."""
    if not is_sweep(folder):
        _save(target, job_page(story_of(read_sources(folder))))
        return
    story = sweep_story_of(folder)
    for job in story.jobs:
        if job.story is None:
            continue
        try:
            save(Path(job.story.folder) / FILE_NAME, job_page(job.story))
        except OSError as error:
            print(f"warning: {job.story.folder}: {error.strerror}", file=sys.stderr)
    _save(target, sweep_page(sweep_story_of(folder)))


def _save(target: Path, page: str) -> None:
    if os.path.exists(target) and not os.path.isfile(target):
        target.write_text(page, "utf-8", "replace")  # a device (/dev/stdout) is not replaced
    else:
        save(target, page)
