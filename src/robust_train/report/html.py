"""Writes ``report.html``, the page of a job or a sweep: a single file that opens anywhere.

The launcher calls `write_report` at a job's end, and ``robust-train report`` calls `job_page`. A
sweep renders its own page with `render`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from robust_train import readable
from robust_train.files import replacing, strict_json
from robust_train.folder.state import figure_of, objective_of
from robust_train.model.json import finite
from robust_train.report import charts, wording
from robust_train.report.facts import USES, Story, speed_of
from robust_train.report.sources import Sources
from robust_train.report.story import story_of

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from jinja2 import Environment

FILE_NAME = "report.html"
TEMPLATES = Path(__file__).parent / "templates"
_LONGEST_TRACEBACK = 20_000  # characters
_LONGEST_VALUE = 200  # characters
# Sets a valid language for uPlot, because a browser without a locale has an invalid language.
_WITH_A_LANGUAGE = (
    "try{new Intl.NumberFormat(navigator.language)}"
    'catch{Object.defineProperty(navigator,"language",{value:"en-US"})}\n'
)


def write_report(sources: Sources) -> None:
    """Write ``report.html`` into a run folder. A failure only costs a warning."""

    def build_page() -> str:
        return job_page(story_of(sources))

    try_to_save(sources.folder / FILE_NAME, build_page)


def try_to_save(path: Path, build_page: Callable[[], str]) -> None:
    """Build and write a page. An error is logged, because a job must not fail for its report."""
    try:
        save(path, build_page())
    except Exception as error:
        log.warning(
            "cannot write %s: %s",
            path,
            readable.named_line(error),
            exc_info=log.isEnabledFor(logging.DEBUG),
        )


def save(path: Path, text: str) -> None:
    """Write a page atomically."""
    with replacing(path) as temporary:
        # A file name on the page may contain bytes that are not valid text.
        temporary.write_bytes(text.encode("utf-8", "replace"))


def job_page(story: Story) -> str:
    """Return the page of a job, as HTML."""
    traceback = ""
    if story.attempts and story.attempts[-1].outcome != "interrupted":
        traceback = story.attempts[-1].traceback or ""
    if len(traceback) > _LONGEST_TRACEBACK:
        traceback = f"…\n{traceback[-_LONGEST_TRACEBACK:]}"
    objective = finite(objective_of(story.result))
    results = story.result if isinstance(story.result, Mapping) else {}
    if story.result is not None and not results and objective is None:
        results = {"result": story.result}
    return render(
        "job.html.j2",
        title=story.name,
        story=story,
        objective=objective,
        figure=(figure_of(story.result) or "what the trainer returned").replace("_", " "),
        shares=shares(story.seconds),
        results=results,
        traceback=traceback,
        clock=charts.Clock(story),
        memory=charts.memory_charts(story),
        curves=charts.curve_charts(story),
    )


def render(template: str, **values: Any) -> str:
    """Return a page from a template, in which every value is escaped."""
    page = template_environment().get_template(template).render(**values)
    return page.replace("\0", "\ufffd")


@functools.cache
def template_environment() -> Environment:
    """Return Jinja's environment with our templates.

    Jinja is imported here, because importing it earlier would slow the launcher's start.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A page contains a copy of uPlot, so it must contain uPlot's licence too.
    licence = f"/*\n{_text('vendor/LICENSE.uPlot.txt')}*/\n"
    library = _text("vendor/uPlot.iife.min.js")
    script = licence + _WITH_A_LANGUAGE + library + _text("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        style=Markup(_text("vendor/uPlot.min.css") + _text("report.css")),
        script=Markup(script),
        # The page loads nothing and runs only its own script, whatever texts it shows.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
    )
    environment.filters.update(
        duration=readable.duration,
        memory=readable.memory,
        percent=readable.percent,
        speed=speed_of,
        moment=readable.moment,
        batch=wording.batch_in_words,
        count=lambda number: "?" if number is None else f"{number:,}",
        use=USES.__getitem__,
        lane=charts.LANES.__getitem__,
        outcome=wording.outcome_in_words,
        action=wording.action_in_words,
        value=value_text,
        shares=shares,
        json=lambda plot: htmlsafe_json_dumps(strict_json(asdict(plot)), separators=(",", ":")),
        link=lambda text: quote(str(text), safe="/", errors="replace"),
    )
    return environment


def prepare() -> None:
    """Import Jinja and compile all templates, so that forks of this process need not do it."""
    environment = template_environment()
    for name in environment.list_templates(["j2"]):
        environment.get_template(name)


def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def shares(seconds: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """Return the style, text, seconds and share of each use of the wall time."""
    wall = seconds.get("wall", 0.0)
    return [
        (use, text, seconds[use], seconds[use] / wall)
        for use, text in USES.items()
        if wall > 0 and use != "stopped" and seconds[use] > 0
    ]


def value_text(value: object) -> str:
    """Return a JSON value as text for readers, shortened."""
    number = finite(value)
    if number is not None:
        return readable.number(number)
    return readable.shorten(str(value), _LONGEST_VALUE)
