"""Warns if the trainer uses an attempt's smaller batch, but not its accumulation, in the process
that trains.

After a lack of memory, the launcher halves the micro-batch and doubles the accumulation. If the
trainer reads only the micro-batch from its config, the effective batch changes without notice.
"""

from __future__ import annotations

import logging

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig

log = logging.getLogger("robust_train")


class Accumulation(InAttempt):
    """Checks once whether the trainer read the number of batches that a step accumulates."""

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self._is_due = False

    def begin(self) -> None:
        """Check whether the attempt accumulates more batches than the user requested."""
        request = self.live.parts.asked
        steps = self.config.training.gradient_accumulation_steps
        accumulates_more = request is not None and steps > request.gradient_accumulation_steps
        # A project has its own name for the key, and a program takes the value from its command.
        has_key = self.config.theirs is None and not self.config.traits.is_program
        self._is_due = self.live.is_main and accumulates_more and has_key

    def boundary(self, what: str) -> None:
        """Warn after the first step, because a loop that accumulates has read the key by then."""
        if what != "reported" or not self._is_due:
            return
        self._is_due = False
        live = self.live
        if live.parts.splits or live.is_steered or not live.has_read("batch_size"):
            return
        if live.has_read("accum"):
            return
        training = self.config.training
        log.warning(
            "the trainer reads training.batch_size=%s, but not "
            "training.gradient_accumulation_steps=%s: unless it accumulates by itself, the "
            "effective batch is smaller than before; read both, or compute gradients with "
            "run.backward",
            training.batch_size,
            training.gradient_accumulation_steps,
        )
