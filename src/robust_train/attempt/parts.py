"""Collects the settings for splitting an attempt's batches, and creates the micro-batcher.

:class:`.live.LiveAttempt` holds one :class:`Parts` in each process that trains. The settings come
from the config, from features and from a script; the first batch that is split fixes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from robust_train.attempt.reports import Reports
from robust_train.attempt.speed import SpeedMeter
from robust_train.config.training_plans import MicroBatchPlan, SplitRule
from robust_train.model.events import Event, MicroBatchChanged, MicroBatchExhausted, SplitChecked
from robust_train.model.failure import Failure

if TYPE_CHECKING:
    from robust_train.model.spec import AttemptSpec
    from robust_train.step.batcher import MicroBatcher, SizeSearch
    from robust_train.step.split_check import SplitCheck


class Parts:
    """Collects settings, and creates the micro-batcher from them at its first use.

    Attributes:
        plan: the batcher's initial settings.
        search: finds the largest batch that fits in the first step, None for no search.
        split_rule: how the loss of the parts is compared with the loss of the whole.
        asked: the split of the batch that the user requested, or None for this attempt's split.
        keeps_batch: the reason why no attempt may split the batch in another way, empty if there
            is none.
        last_micro_batch: the smallest micro-batch to which a step of this attempt was reduced
            because memory ran out, or None.
    """

    def __init__(
        self, reports: Reports, speed: SpeedMeter, ran_out: Callable[[BaseException, Failure], None]
    ) -> None:
        self.plan = MicroBatchPlan()
        self.search: SizeSearch | None = None
        self.split_rule = SplitRule()
        self.asked: AttemptSpec | None = None
        self.keeps_batch = ""
        self.last_micro_batch: int | None = None
        self._reports = reports
        self._speed = speed
        self._ran_out = ran_out
        self._before_first: Callable[[], None] = lambda: None
        self._batcher: MicroBatcher | None = None

    def split_by(self, plan: MicroBatchPlan) -> None:
        """Split as ``plan`` says."""
        self.plan = plan

    def search_with(self, search: SizeSearch) -> None:
        """Let ``search`` find the largest batch that fits during the first step."""
        self.search = search

    def check_by(self, rule: SplitRule) -> None:
        """Check the losses of the parts with this rule."""
        self.split_rule = rule

    def set_asked(self, requested: AttemptSpec | None) -> None:
        """Set the split of the batch that the user requested."""
        self.asked = requested

    def keep_batch(self, reason: str) -> None:
        """Forbid all attempts to split the batch in another way."""
        self.keeps_batch = reason

    def call_before_first(self, do: Callable[[], None]) -> None:
        """Call ``do`` before the first batch is split."""
        self._before_first = do

    @property
    def splits(self) -> bool:
        """Whether the trainer has used the batcher."""
        return self._batcher is not None

    def batcher(self) -> MicroBatcher:
        """Return the batcher, which is created at first use."""
        if self._batcher is None:
            self._before_first()
            self._batcher = self._create_batcher()
        return self._batcher

    def _create_batcher(self) -> MicroBatcher:
        # This imports torch, which the launcher does not have.
        from robust_train.step.batcher import MicroBatcher
        from robust_train.step.recorder import Recorder
        from robust_train.step.split_watch import SplitWatch

        watch = SplitWatch(self.split_rule, self._on_split_checked, self._reports.muted)
        recorder = Recorder(self._current_step, self._on_change, self._ran_out, self._speed, watch)
        return MicroBatcher(**asdict(self.plan), search=self.search, recorder=recorder)

    def _current_step(self) -> int:
        return 1 + self._reports.steps_done

    def _on_split_checked(self, step: int, check: SplitCheck, ends_attempt: bool) -> None:
        kept = check.kept.value
        self._reports.send(SplitChecked(step, kept, check.message, check.samples, ends_attempt))

    def _on_change(self, event: Event) -> None:
        if isinstance(event, (MicroBatchChanged, MicroBatchExhausted)):
            if event.training:
                size = getattr(event, "after", None) or event.before
                self.last_micro_batch = min(size, self.last_micro_batch or size)
            event = replace(event, last_micro_batch=self.last_micro_batch)
        self._reports.send(event)

    def shrink(self, reason: str) -> tuple[int, int] | None:
        """Split into smaller parts from the next batch on. Returns the old and the new size, or
        None if there is no smaller size."""
        return self.batcher().shrink(reason)

    def stop_splitting(self) -> None:
        """Refuse requests for a smaller micro-batch from here on."""
        self._batcher = None
