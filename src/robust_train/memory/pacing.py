"""When emptying the CUDA cache during training pays, and is not too soon for what it costs; and
when the allocator's own clearings show that memory is nearly out.

Decisions only: nothing here reads a clock or the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

_CAME_BACK = 0.5
_LONGEST_GAP = 100_000
_MOST_OF_THE_TIME = 0.01


class BackOff:
    """The occasions of one kind (steps, saves, epochs) on which the cache is checked.

    Clearing pays where the returned memory stays away. What training takes again has to be
    requested from the driver anew, which is slow; so where more than half of it has come back by
    the next check, twice as many occasions pass until another clearing: at most 18 useless ones in
    100,000 steps.

    Args:
        frequency: occasions between checks where clearing pays, at least 1.
        threshold: share of the reserved memory that must be unused, 0 to 1.
        skips_first: the first check is due ``frequency`` occasions after the first one.
    """

    def __init__(
        self, frequency: int = 1, threshold: float = 0.0, *, skips_first: bool = False
    ) -> None:
        self._frequency = self._gap = frequency
        self._threshold = threshold
        self._skips_first = skips_first
        self._due: int | None = None
        self._cleared: tuple[int, int] | None = None

    def is_due(self, number: int) -> bool:
        """Return whether to check the cache on the occasion with this number."""
        if self._due is None:
            self._due = number + (self._gap if self._skips_first else 0)
        return number >= self._due

    def check(self, number: int, reserved: int, unused_share: float) -> bool:
        """Return whether clearing pays on this occasion, and plan the next check."""
        if self._cleared is not None:
            after, returned = self._cleared
            has_come_back = reserved - after > _CAME_BACK * returned
            longer = min(2 * self._gap, max(_LONGEST_GAP, self._frequency))
            self._gap = longer if has_come_back else self._frequency
            self._cleared = None
        self._due = number + self._gap
        return unused_share > 0 and unused_share >= self._threshold

    def cleared(self, after: int, returned: int) -> None:
        """Record a clearing: bytes that stayed reserved, and bytes that were returned."""
        self._cleared = (after, returned)


class Cost:
    """The time that clearing costs, in seconds: its own, and taking the memory again.
    ``cudaMalloc`` waits for the GPU, so memory that a step has to take again makes it longer."""

    def __init__(self) -> None:
        self._last = 0.0
        self._ended = float("-inf")
        self._usual_step: float | None = None
        self._step_began: float | None = None
        self.was_cleared = False
        """Since the last step."""

    def is_affordable(self, now: float) -> bool:
        """Return whether clearing again keeps it below one percent of the time."""
        return (now - self._ended) * _MOST_OF_THE_TIME >= self._last

    def clearing_done(self, seconds: float, now: float) -> None:
        """Record a clearing that took ``seconds``; the next step begins now."""
        self._last, self._ended, self._step_began, self.was_cleared = seconds, now, now, True

    def step_done(self, now: float) -> None:
        """Record the end of a step."""
        began, self._step_began = self._step_began, now
        if began is None:
            return
        if not self.was_cleared:
            self._usual_step = now - began
        elif self._usual_step is not None:
            self._last += max(now - began - self._usual_step, 0.0)
        self.was_cleared = False


@dataclass(frozen=True)
class AllocRetries:
    """Steps in a row in which the allocator had to empty its cache; ``total`` counts how often."""

    total: int | None = None
    steps: int = 0

    @property
    def is_tight(self) -> bool:
        """Whether that is a warning of running out of memory."""
        return self.steps >= 2

    def after_step(self, total: int) -> AllocRetries:
        """Return it after another step; what was before the first one seen does not count."""
        has_retried = self.total is not None and total > self.total
        return AllocRetries(total, self.steps + 1 if has_retried else 0)
