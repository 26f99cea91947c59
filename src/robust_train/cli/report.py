"""``robust-train report``: writes ``report.html`` of a job or a sweep from the files in its folder.

``--json`` prints the data behind the page, and ``--cite`` sentences for a paper.
"""

from __future__ import annotations

import os
import webbrowser
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.cli.command import Answer, UsageError
from robust_train.model.errors import NotDoneError

if TYPE_CHECKING:
    from robust_train.report.facts import Story
    from robust_train.sweep.page import SweepStory


def write_report(arguments: Namespace) -> Answer:
    """Write ``report.html`` of the named job or sweep, or print its data or sentences to cite."""
    from robust_train.folder.requests import SWEEP_FILE
    from robust_train.folder.run_list import sweep_at
    from robust_train.report.facts import Story
    from robust_train.report.html import FILE_NAME, job_page, save
    from robust_train.report.sources import read_sources
    from robust_train.report.story import story_of
    from robust_train.sweep.page import read_sweep_story, sweep_page

    story: Story | SweepStory
    sweep = sweep_at(arguments.which)
    if sweep is not None:
        folder = sweep
        story = read_sweep_story(folder)
    else:
        folder = _find_run_folder(arguments.which)
        story = story_of(read_sources(folder))
    if isinstance(story, Story) and story.status == "empty":
        raise UsageError(
            f"{folder}: neither a run folder (with journal.jsonl) nor a sweep folder "
            f"(with {SWEEP_FILE})"
        )
    if arguments.json:
        return Answer(story.as_json())
    if arguments.cite:
        return _cite(story)
    if isinstance(story, Story):
        pages = {folder: job_page(story)}
    else:
        stories = [job.story for job in story.jobs if job.story is not None]
        pages = {Path(job_story.folder): job_page(job_story) for job_story in stories}
        pages[folder] = sweep_page(story)
    problems = []
    for page_folder, page in pages.items():
        try:
            save(page_folder / FILE_NAME, page)
        except OSError as error:
            problems.append(f"cannot write {page_folder / FILE_NAME}: {error.strerror}")
    target = folder / FILE_NAME
    if arguments.open and not webbrowser.open(target.resolve().as_uri()):
        problems.append("--open: no browser was found")
    return Answer(shown=[str(target)], error="; ".join(problems))


def _cite(story: Story | SweepStory) -> Answer:
    """Return sentences about a job for a paper, and an entry for its bibliography."""
    from robust_train.report.citation import BIBTEX, sentences_of
    from robust_train.report.facts import Story

    if not isinstance(story, Story):
        raise UsageError("--cite is about one job: name a job of the sweep")
    version = metadata.version("robust-train")
    sentences = sentences_of(story, version)
    if not sentences:
        raise NotDoneError(f"{story.folder}: no step was trained, so there is nothing to cite")
    return Answer(shown=[" ".join(sentences), "", BIBTEX.format(version=version)])


def _find_run_folder(which: str | None) -> Path:
    """Return the folder of the user's run with this id, name or path. A copied folder that is not
    on the user's list of runs is also accepted."""
    from robust_train.folder.run_list import NoLiveRunError, choose_run

    try:
        return choose_run(which, dead_too=True, command="report").run_dir
    except NoLiveRunError as error:
        if which is None:
            raise
        path = Path(which)
        if not os.path.exists(path):
            problem = f"{path}: no such folder, and no run of yours has that id or name"
            raise UsageError(problem) from error
        return path.parent if os.path.isfile(path) else path
