"""Shows the live status of a job on a terminal, below all other output.

The launcher and ``robust-train attach`` use `LiveStatus`. A sweep shows its table with `LiveLines`.
"""

from __future__ import annotations

import contextlib
import math
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from robust_train.folder.state import RunState
from robust_train.host.live_area import LiveArea, live_area
from robust_train.model.attempt import Attempt
from robust_train.readable import as_clock, memory, number, of_all
from robust_train.report.facts import speed_of
from robust_train.report.wording import batch_in_words, samples_per_second, seconds_per_step

if TYPE_CHECKING:
    from rich.text import Text
    from typing_extensions import Self

_BAR_COLUMNS = 48  # of the progress bar, at most
_MOST_LINES = 3  # of a part that is too long for a line
_DONE = "━"
_LEFT = "─"


def status_lines(state: RunState, now: float, columns: int) -> list[str]:
    """Return the status as lines of at most ``columns`` characters. An ended job has no lines."""
    if state.is_final:
        return []
    lines = _pack_parts(_describe_state(state, now), columns)
    attempt = state.attempt
    if attempt is None or state.state not in ("running", "stopping"):
        return lines
    if attempt.step is not None and attempt.total_steps and state.state == "running":
        width = min(columns - 6, _BAR_COLUMNS)
        done = max(min(attempt.step / attempt.total_steps, 1.0), 0.0)
        full = int(done * width)
        bar = f"{_DONE * full}{_LEFT * (width - full)} {100 * done:3.0f} %"
        lines.append(bar)
    return lines + _pack_parts(_describe_progress(state, attempt), columns)


def _describe_state(state: RunState, now: float) -> list[str]:
    """Return the parts of the first line: the state and its reason, attempt, device and sizes."""
    parts = [f"{state.state} {as_clock(int(max(now - state.since, 0)))}"]
    attempt = state.attempt
    if state.state == "waiting" and state.waiting is not None:
        reason = str(state.waiting.get("reason", ""))
        parts.append(reason.removeprefix("waiting "))
    elif state.state == "between attempts":
        parts.append(str(state.reason or ""))
    elif attempt is not None and state.state != "starting":
        parts.append(f"attempt {attempt.number} on {attempt.spec.where}")
        if attempt.spec.has_batch:
            parts.append(batch_in_words(attempt))
    return parts


def _describe_progress(state: RunState, attempt: Attempt) -> list[str]:
    """Return the parts of the last lines: step, speed, time left, loss, memory, checkpoint."""
    parts = []
    step = attempt.step
    total = attempt.total_steps
    if step is not None:
        parts.append(f"step {of_all(step, total)}")
    speed = speed_of(attempt)
    seconds = seconds_per_step(speed)
    if seconds:
        rate = samples_per_second(speed, attempt.spec.ranks)
        if rate is None:
            parts.append(f"{number(1 / seconds)} steps/s")
        else:
            parts.append(f"{number(rate)} samples/s")
        if total and step is not None:
            left = math.ceil((total - step) * seconds)
            parts.append(f"{as_clock(max(left, 0))} left")
    slow = attempt.noted("slow", "")
    if slow:
        parts.append(slow)
    if attempt.loss is not None:
        parts.append(f"loss {number(attempt.loss)}")
    used = attempt.memory.get("allocated", attempt.memory.get("resident"))
    if used:
        parts.append(f"memory {memory(used)}")
    if state.checkpoint is not None:
        saved = state.checkpoint_step
        parts.append("checkpoint" if saved is None else f"checkpoint step {saved}")
    return parts


def _pack_parts(parts: Sequence[str], columns: int) -> list[str]:
    """Return the parts side by side, in as few lines as possible. Long parts are wrapped."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f" · {part}"
        else:
            width = max(columns, 10)
            lines += textwrap.wrap(part, width, max_lines=_MOST_LINES, placeholder=" …")
    return lines


class LiveLines(contextlib.ExitStack):
    """Shows lines below all output on a terminal. If the output is not a terminal, shows nothing.

    Args:
        is_wanted: False if another program part needs the terminal.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        super().__init__()
        self._is_wanted = is_wanted
        self.area: LiveArea | None = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            self.area = self.enter_context(live_area())
            self.callback(setattr, self, "area", None)
        return super().__enter__()

    def draw(self, lines: Sequence[str]) -> None:
        """Show ``lines`` in place of the lines shown before."""
        if self.area is not None:
            self.area.show([_styled(line) for line in lines])


class LiveStatus(LiveLines):
    """Shows a job's state on its terminal, unless the job shares the terminal."""

    def show(self, state: RunState) -> None:
        """Show ``state`` at the current time."""
        if self.area is not None:
            self.draw(status_lines(state, time.time(), self.area.size[0]))


def _styled(line: str) -> Text:
    """Return a line in green if it is the progress bar, otherwise dimmed."""
    from rich.text import Text

    is_bar = line.startswith((_DONE, _LEFT))
    return Text(line, style="green" if is_bar else "dim")
