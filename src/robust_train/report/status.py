"""The live status of a job on a terminal. Pure, but for :class:`LiveStatus`, which shows it."""

from __future__ import annotations

import contextlib
import logging
import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robust_train.folder.state import RunState
from robust_train.host.job_logging import shorten_lines_on_terminals
from robust_train.host.screen import LiveArea, live_area
from robust_train.queue.waiting import WaitStatus
from robust_train.readable import as_clock, by_processes, changed, memory, number

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from rich.text import Text

_PACE_SECONDS = 30.0
_BAR_COLUMNS = 48
_MOST_LINES = 3
_DONE, _LEFT = "━", "─"


@dataclass(frozen=True)
class Pace:
    """How fast a job's states follow each other; times are seconds of a monotonic clock."""

    state: RunState | None = None
    since: float = 0.0  # when the job came into its state
    # (time, step) of the last half minute, of one attempt
    steps: tuple[tuple[float, int], ...] = ()
    # when its last checkpoint was reported, None before the first
    checkpoint_at: float | None = None

    def after(self, state: RunState, now: float) -> Pace:
        """Return the pace after one more look at the state."""
        before = self.state
        steps, since, saved = self.steps, self.since, self.checkpoint_at
        is_other = before is None or _number(before) != _number(state)
        if before is None or is_other or before.state != state.state:
            since = now
        if is_other:
            steps = ()
        if before is not None and before.checkpoint != state.checkpoint:
            saved = now
        step = None if state.attempt is None else state.attempt.step
        if step is not None and (not steps or steps[-1][1] != step):
            recent = tuple(one for one in steps if now - one[0] < _PACE_SECONDS)
            steps = (*(recent or steps[-1:]), (now, step))
        return Pace(state, since, steps, saved)

    def steps_per_second(self, now: float) -> float | None:
        """Return the speed, None while it is unknown or nothing moves."""
        if len(self.steps) < 2:
            return None
        (first, start), (last, end) = self.steps[0], self.steps[-1]
        if now - last > max(_PACE_SECONDS, 2 * (last - first)):
            return None
        return (end - start) / (last - first) if end > start and last > first else None


def _number(state: RunState) -> int | None:
    return None if state.attempt is None else state.attempt.number


def status_lines(state: RunState, pace: Pace, now: float, columns: int) -> list[str]:
    """Return the status as lines of at most ``columns`` characters, none for a job that ended."""
    if state.is_final:
        return []
    bars = [bar] if (bar := _bar(state, min(columns - 6, _BAR_COLUMNS))) else []
    where, how_far = _where(state, pace, now), _how_far(state, pace, now)
    return [*_packed(where, columns), *bars, *_packed(how_far, columns)]


def _where(state: RunState, pace: Pace, now: float) -> list[str]:
    """Return the parts of the first line: state and why, attempt, device, sizes."""
    parts = [f"{state.state} {as_clock(int(now - pace.since))}"]
    if state.state == "waiting" and state.waiting is not None:
        return [*parts, str(state.waiting.get("reason", "")).removeprefix("waiting ")]
    if state.state == "between attempts":
        return [*parts, str(state.reason or "")]
    attempt = state.attempt
    if attempt is None or state.state == "starting":
        return parts
    spec = attempt.spec
    parts += [f"attempt {attempt.number} on {spec.device if spec.gpus else 'the CPU'}"]
    if not spec.has_batch:
        return parts
    size = changed(spec.batch_size, attempt.micro_batch)
    steps = f"{spec.gradient_accumulation_steps}{by_processes(spec.ranks)}"
    return [*parts, f"micro-batch {size} × {steps}"]


def _how_far(state: RunState, pace: Pace, now: float) -> list[str]:
    """Return the parts of the second line: step, speed, time left, loss, memory, checkpoint."""
    attempt = state.attempt
    if state.state not in ("running", "stopping") or attempt is None:
        return []
    parts = []
    speed, step = pace.steps_per_second(now), attempt.step
    if step is not None:
        total = f"/{attempt.total_steps}" if attempt.total_steps else ""
        parts.append(f"step {step}{total}")
    if speed is not None:
        is_known = all(one.samples_per_second is not None for one in attempt.speed)
        size = attempt.spec.effective_batch_size if attempt.speed and is_known else None
        parts.append(
            f"{number(speed * (size or 1))} {'samples' if size else 'steps'}/s"
        )
    if speed is not None and attempt.total_steps and step is not None:
        left = math.ceil((attempt.total_steps - step) / speed)
        parts.append(f"{as_clock(max(left, 0))} left")
    if attempt.loss is not None:
        parts.append(f"loss {number(attempt.loss)}")
    if used := attempt.memory.get("allocated", attempt.memory.get("resident")):
        parts.append(f"memory {memory(used)}")
    if state.checkpoint is not None:
        saved = (
            "" if state.checkpoint_step is None else f" step {state.checkpoint_step}"
        )
        ago = (
            ""
            if pace.checkpoint_at is None
            else f", {as_clock(int(now - pace.checkpoint_at))} ago"
        )
        parts.append(f"checkpoint{saved}{ago}")
    return parts


def _packed(parts: Sequence[str], columns: int) -> list[str]:
    """Return the parts side by side, in as few lines as they fit into; long ones are wrapped."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f" · {part}"
        else:
            width = max(columns, 10)
            lines += textwrap.wrap(part, width, max_lines=_MOST_LINES, placeholder=" …")
    return lines


def _bar(state: RunState, columns: int) -> str:
    """Return a bar of the steps that are done; empty where their number is unknown."""
    attempt = state.attempt
    if state.state != "running" or attempt is None or attempt.step is None:
        return ""
    if not attempt.total_steps:
        return ""
    done = max(min(attempt.step / attempt.total_steps, 1.0), 0.0)
    full = int(done * columns)
    return f"{_DONE * full}{_LEFT * (columns - full)} {100 * done:3.0f} %"


class LiveStatus:
    """Shows a job's state on its terminal, if it has one to itself; a context manager.

    Args:
        is_wanted: False where the job shares the terminal, or a debugger may need it.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._open = contextlib.ExitStack()
        self._area: LiveArea | None = None
        self._pace = Pace()
        self._logged: tuple[object, ...] = ()

    def __enter__(self) -> LiveStatus:
        shorten_lines_on_terminals()
        if self._is_wanted:
            self._area = self._open.enter_context(live_area())
        return self

    def __exit__(self, *error: object) -> None:
        self._area = None
        self._open.close()

    def show(self, state: RunState) -> None:
        """Show the state as it is now."""
        if self._area is None:
            return
        now, columns = time.monotonic(), self._area.size[0]
        self._pace = self._pace.after(state, now)
        lines = status_lines(state, self._pace, now, columns)
        self._area.show([_styled(line, number) for number, line in enumerate(lines)])

    def log_waiting(self, status: WaitStatus) -> None:
        """Log each poll of a job that waits, where the screen does not show it."""
        poll = (status.checks, status.obstacles)
        if self._area is None and status.checks and poll != self._logged:
            self._logged = poll
            log.info("%s", status.sentence())


def _styled(line: str, number: int) -> Text:
    from rich.text import Text

    if line.startswith((_DONE, _LEFT)):
        return Text(line, style="green")
    text = Text(line, style="dim")
    if number == 0:
        text.stylize("not dim bold", 0, line.find(" ·") % (len(line) + 1))
    return text
