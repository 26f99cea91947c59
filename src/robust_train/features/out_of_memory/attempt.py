"""Warns of a trainer that uses the smaller batch of an attempt, but not its accumulation."""

from __future__ import annotations

import logging

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig

log = logging.getLogger("robust_train")


class Accumulation(InAttempt):
    """Checks once whether a trainer has read how many batches an optimizer step accumulates."""

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self._is_due = False

    def begin(self) -> None:
        """See whether the attempt accumulates more batches than the job was asked for."""
        request = self.live.parts.asked
        steps = self.config.training.gradient_accumulation_steps
        accumulates_more = request is not None and steps > request.gradient_accumulation_steps
        # A project has its own name for the key, and a program takes the value from its command.
        has_key = self.config.theirs is None and not self.config.traits.is_program
        self._is_due = self.live.is_main and accumulates_more and has_key

    def boundary(self, what: str) -> None:
        """Warn after the first step, by which a loop that accumulates has read the key."""
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
