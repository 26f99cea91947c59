"""The live status of a job on a terminal. Pure, but for :class:`LiveStatus`, which shows it."""

from __future__ import annotations

import contextlib
import logging
import math
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from robust_train.folder.state import RunState
from robust_train.host.screen import LiveArea, live_area
from robust_train.model.attempt import Attempt
from robust_train.queue.waiting import WaitStatus
from robust_train.readable import as_clock, by_processes, memory, number

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from rich.text import Text
    from typing_extensions import Self

_PACE_SECONDS = 30.0
_BAR_COLUMNS = 48
_MOST_LINES = 3
_DONE, _LEFT = "━", "─"


class Pace:
    """How fast a job's states follow each other, by the clock of the states."""

    def __init__(self) -> None:
        self._attempt = 0
        # (time, step), of about half a minute
        self._steps: list[tuple[float, int]] = []
        self._checkpoint: str | None = None
        self.saved_at: float | None = None  # its last checkpoint, None before the first

    def follow(
        self,
        state: RunState,
        now: float,
    ) -> None:
        """Look at the state once more."""
        attempt = state.attempt
        if attempt is not None:
            if attempt.number != self._attempt:
                self._steps.clear()
            step = attempt.step
            if step is not None and (not self._steps or self._steps[-1][1] != step):
                recent = [one for one in self._steps if now - one[0] < _PACE_SECONDS]
                self._steps = [*(recent or self._steps[-1:]), (now, step)]
            if self._attempt and state.checkpoint != self._checkpoint:
                self.saved_at = now
            self._attempt, self._checkpoint = attempt.number, state.checkpoint

    def steps_per_second(self, now: float) -> float:
        """Return the speed, 0 while it is unknown or nothing moves."""
        if len(self._steps) < 2:
            return 0.0
        (first, start), (last, end) = self._steps[0], self._steps[-1]
        if last <= first or now - last > max(_PACE_SECONDS, 2 * (last - first)):
            return 0.0
        return max(end - start, 0) / (last - first)


def status_lines(
    state: RunState,
    pace: Pace,
    now: float,
    columns: int,
) -> list[str]:
    """Return the status as lines of at most ``columns`` characters; none if the job has ended."""
    if state.is_final:
        return []
    lines = _packed(_where(state, now), columns)
    attempt = state.attempt
    if attempt is None or state.state not in ("running", "stopping"):
        return lines
    if attempt.step is not None and attempt.total_steps and state.state == "running":
        width = min(columns - 6, _BAR_COLUMNS)
        done = max(min(attempt.step / attempt.total_steps, 1.0), 0.0)
        full = int(done * width)
        bar = f"{_DONE * full}{_LEFT * (width - full)} {100 * done:3.0f} %"
        lines.append(bar)
    return lines + _packed(_how_far(state, attempt, pace, now), columns)


def _where(state: RunState, now: float) -> list[str]:
    """Return the parts of the first line: state and why, attempt, device, sizes."""
    parts = [f"{state.state} {as_clock(int(max(now - state.since, 0)))}"]
    if state.state == "waiting" and state.waiting is not None:
        return [*parts, str(state.waiting.get("reason", "")).removeprefix("waiting ")]
    if state.state == "between attempts":
        return [*parts, str(state.reason or "")]
    attempt = state.attempt
    if attempt is None or state.state == "starting":
        return parts
    spec = attempt.spec
    parts.append(f"attempt {attempt.number} on {spec.where}")
    if spec.has_batch:
        size = " → ".join(map(str, attempt.sizes))
        steps = f"{spec.accumulation}{by_processes(spec.ranks)}"
        parts.append(f"micro-batch {size} × {steps}")
    return parts


def _how_far(
    state: RunState,
    attempt: Attempt,
    pace: Pace,
    now: float,
) -> list[str]:
    """Return the parts of the last lines: step, speed, time left, loss, memory, checkpoint."""
    parts = []
    speed, step, total = pace.steps_per_second(now), attempt.step, attempt.total_steps
    if step is not None:
        parts.append(f"step {step}/{total}" if total else f"step {step}")
    if speed:
        rates = [one.samples_per_second for one in attempt.speed]
        if rates and None not in rates:
            samples = speed * attempt.spec.effective_batch_size
            parts.append(f"{number(samples)} samples/s")
        else:
            parts.append(f"{number(speed)} steps/s")
        if total and step is not None:
            left = math.ceil((total - step) / speed)
            parts.append(f"{as_clock(max(left, 0))} left")
    if attempt.slow:
        parts.append(attempt.slow)
    if attempt.loss is not None:
        parts.append(f"loss {number(attempt.loss)}")
    if used := attempt.memory.get("allocated", attempt.memory.get("resident")):
        parts.append(f"memory {memory(used)}")
    if state.checkpoint is not None:
        saved, ago = state.checkpoint_step, pace.saved_at
        at = "" if saved is None else f" step {saved}"
        when = "" if ago is None else f", {as_clock(int(now - ago))} ago"
        parts.append(f"checkpoint{at}{when}")
    return parts


def _packed(parts: Sequence[str], columns: int) -> list[str]:
    """Return the parts side by side, in as few lines as they fit into; long ones are wrapped."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f" · {part}"
        else:
            width = max(columns, 10)
            lines += textwrap.wrap(
                part,
                width,
                max_lines=_MOST_LINES,
                placeholder=" …",
            )
    return lines


class LiveLines(contextlib.ExitStack):
    """Lines below all that is printed, on a terminal; elsewhere nothing.

    Args:
        is_wanted: False where something else needs the terminal.
    """

    def __init__(self, *, is_wanted: bool = True) -> None:
        super().__init__()
        self._is_wanted = is_wanted
        self._area: LiveArea | None = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            self._area = self.enter_context(live_area())
            self.callback(setattr, self, "_area", None)
        return super().__enter__()


class LiveStatus(LiveLines):
    """Shows a job's state on its terminal, if it has one to itself."""

    def __init__(self, *, is_wanted: bool) -> None:
        super().__init__(is_wanted=is_wanted)
        self._pace = Pace()
        self._logged: tuple[object, ...] = ()

    def show(self, state: RunState) -> None:
        """Show the state as it is now."""
        if self._area is not None:
            now, columns = time.time(), self._area.size[0]
            self._pace.follow(state, now)
            lines = status_lines(state, self._pace, now, columns)
            self._area.show([_styled(line, n) for n, line in enumerate(lines)])

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
        text.stylize(
            "not dim bold",
            0,
            line.find(" ·") % (len(line) + 1),
        )
    return text
