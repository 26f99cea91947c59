"""``robust-train report``: write ``report.html`` from what a run or sweep folder holds."""

from __future__ import annotations

import os
import sys
import webbrowser
from argparse import Namespace
from pathlib import Path

from robust_train.cli.command import Answer, CommandFailed
from robust_train.model.errors import EXIT_BAD_CONFIG
from robust_train.report.html import FILE_NAME, job_page, save
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of
from robust_train.sweep.page import is_sweep, sweep_page, sweep_story_of


def report(arguments: Namespace) -> Answer:
    """Write the report, or return the data behind it."""
    folder = Path(arguments.path)
    if os.path.isfile(folder):
        folder = folder.parent
    _check(folder)
    if arguments.json:
        data = (
            sweep_story_of(folder)
            if is_sweep(folder)
            else story_of(read_sources(folder))
        )
        return Answer(data.as_json())
    target = Path(arguments.output) if arguments.output else folder / FILE_NAME
    try:
        _write(folder, target)
    except OSError as error:
        raise CommandFailed(f"cannot write {target}: {error.strerror}") from error
    warnings = []
    if arguments.open and not webbrowser.open(target.resolve().as_uri()):
        warnings.append("--open: no browser was found")
    return Answer(shown=[str(target)], warnings=warnings)


def _check(folder: Path) -> None:
    """Raise CommandFailed if the folder is that of neither a run nor a sweep."""
    if not os.path.isdir(folder):
        raise CommandFailed(f"{folder}: no such folder", EXIT_BAD_CONFIG)
    of_a_run = any(
        os.path.exists(folder / name) for name in ("journal.jsonl", "summary.json")
    )
    if not of_a_run and not is_sweep(folder):
        problem = (
            "neither a run folder (with journal.jsonl) "
            "nor a sweep folder (with jobs' folders)"
        )
        raise CommandFailed(f"{folder}: {problem}", EXIT_BAD_CONFIG)


def _write(folder: Path, target: Path) -> None:
    """Write the page, and of a sweep that of each job; OSError if the page itself cannot be."""
    if not is_sweep(folder):
        _save(target, job_page(story_of(read_sources(folder))))
        return
    for job in sweep_story_of(folder).jobs:
        if job.story is None:
            continue
        try:
            save(Path(job.story.folder) / FILE_NAME, job_page(job.story))
        except OSError as error:
            print(f"warning: {job.story.folder}: {error.strerror}", file=sys.stderr)
    # read again: it links to the pages that are there now
    _save(target, sweep_page(sweep_story_of(folder)))


def _save(target: Path, page: str) -> None:
    if os.path.exists(target) and not os.path.isfile(target):
        target.write_text(
            page, "utf-8", "replace"
        )  # a device (/dev/stdout) is not replaced
    else:
        save(target, page)
