"""``report.html``: one file that needs nothing else, to open anywhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from robust_train import readable
from robust_train.files import replacing
from robust_train.report import figures, wording
from robust_train.report.attempts import AttemptStory
from robust_train.report.sources import finite, read_sources
from robust_train.report.story import Story, story_of
from robust_train.report.times import Use

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger("robust_train")

FILE_NAME = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_LONGEST_TRACEBACK = 20_000
_LONGEST_VALUE = 200


def write_report(run_dir: Path) -> Path | None:
    """Write ``report.html`` into a run folder; None, after a warning, where that fails."""
    return try_to_save(run_dir / FILE_NAME, lambda: job_page(story_of(read_sources(run_dir))))


def try_to_save(path: Path, page: Callable[[], str]) -> Path | None:
    """Make a page and write it; None after a warning where either fails."""
    try:
        return save(path, page())
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror or error)
    except Exception as error:  # a job that trained for days must not fail for its report
        log.warning("no report: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(10))
    return None


def save(path: Path, text: str) -> Path:
    """Write a page, whole or not at all; returns its path.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as temporary:
        # a path may hold bytes that are no text
        temporary.write_bytes(text.encode("utf-8", "replace"))
    return path


def job_page(story: Story) -> str:
    """Return the page of one job."""
    timeline = figures.timeline_figure(story)
    return render(
        "job.html.j2",
        title=story.name,
        story=story,
        tiles=_tiles(story),
        shares=shares(story.seconds),
        results=_results(story.result),
        traceback=_traceback(story.attempts),
        timeline=timeline,
        memory=figures.memory_figures(story),
        curves=figures.curve_figures(story),
    )


def render(template: str, **values: Any) -> str:
    """Return a page from a template; all values but the charts' SVG are escaped."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    # here and not above: the launcher starts without it
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # the page loads nothing and runs no script but its own, whatever its texts hold
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
    )
    environment.tests["in_attempt"] = lambda name, number: name.startswith(f"oom-attempt-{number}.")
    environment.filters.update(
        svg=Markup,
        duration=readable.duration,
        memory=readable.memory,
        percent=readable.percent,
        moment=readable.moment,
        size=figures.size_text,
        count=lambda number: "?" if number is None else f"{number:,}",
        outcome=lambda name: wording.OUTCOMES.get(name, name.replace("_", " ")),
        action=lambda name: wording.ACTIONS.get(name, (name or "").replace("_", " ")),
        words=lambda text: str(text).replace("_", " "),
        value=value_text,
        shares=shares,
        link=lambda text: quote(str(text), safe="/", errors="replace"),
    )
    return environment


def shares(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the uses of the wall time, each with its share; none for a job without any."""
    wall = seconds.get("wall", 0.0)
    return [
        {
            "style": use.value,
            "text": figures.USES[use],
            "seconds": seconds[use.value],
            "share": seconds[use.value] / wall,
        }
        for use in figures.USES
        if wall > 0 and use is not Use.STOPPED and seconds[use.value] > 0
    ]


def value_text(value: Any) -> str:
    """Return a value of JSON for people, shortened."""
    number = finite(value)
    if number is not None:
        return readable.number(number)
    return readable.shortened(str(value), _LONGEST_VALUE)


def _tiles(story: Story) -> list[tuple[str, str, str]]:
    """Return (label, figure, explanation) of the most important figures."""
    tiles = []
    if finite(story.objective) is not None:
        tiles.append(("result", value_text(story.objective), "what the trainer returned"))
    if "wall" in story.seconds:
        tiles.append(("wall time", readable.duration(story.seconds["wall"]), "from start to end"))
    if story.useful_share is not None:
        tiles.append(("useful", readable.percent(story.useful_share), "of the wall time"))
    if story.attempts:
        where = ", ".join(dict.fromkeys(attempt.device for attempt in story.attempts))
        tiles.append(("attempts", str(len(story.attempts)), where))
    if story.peak_memory_bytes is not None:
        device = story.attempts[-1].where
        tiles.append(("peak memory", readable.memory(story.peak_memory_bytes), f"on {device}"))
    return tiles


def _results(result: Any) -> list[tuple[str, str]]:
    if isinstance(result, Mapping):
        return [(str(name), value_text(value)) for name, value in result.items()]
    return [] if result is None or finite(result) is not None else [("result", value_text(result))]


def _traceback(attempts: Sequence[AttemptStory]) -> str | None:
    """Return that of the last attempt, if it ended the job."""
    last = attempts[-1] if attempts else None
    if last is None or last.traceback is None or last.outcome == "interrupted":
        return None
    text = last.traceback
    return text if len(text) <= _LONGEST_TRACEBACK else "…\n" + text[-_LONGEST_TRACEBACK:]
