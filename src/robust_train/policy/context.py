"""The evidence that a remedy may use after a failure.

:func:`.decide.decide` creates a `FailureContext` for each failure, in the launcher, and passes it
to each remedy. Pure.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import RobustConfig
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import AttemptSpec, Knob, Retry, Room
from robust_train.policy.gpus import uuids
from robust_train.policy.result_warnings import warn_of_changes
from robust_train.policy.settings import PolicySettings, list_sizes

_MOST_PRESUMED = 20
"""The largest number of attempts in a row that count as progress although their steps are
unknown."""


@dataclass(frozen=True)
class Offers:
    """The GPUs that the next attempt may use."""

    # GPUs that are available now, best first, including the job's own GPUs.
    gpus: tuple[GpuInfo, ...] = ()
    # GPUs that the job may use, but that other jobs hold now.
    held: tuple[GpuInfo, ...] = ()


@dataclass(frozen=True)
class FailureContext:
    """A failure, the attempts before it, and the GPUs for the next attempt."""

    settings: PolicySettings  # the user's settings
    # Every attempt so far. The last attempt failed.
    history: tuple[Attempt, ...]
    offers: Offers

    # --- the attempt that failed ---

    @property
    def config(self) -> RobustConfig:
        """The job's config."""
        return self.settings.config

    @property
    def attempt(self) -> Attempt:
        """The attempt that failed."""
        return self.history[-1]

    @property
    def failure(self) -> Failure:
        """The attempt's failure."""
        failure = self.attempt.failure
        assert failure is not None, "a completed attempt needs no decision"
        return failure

    @property
    def evidence(self) -> Evidence:
        """The known facts about the failure."""
        return self.failure.evidence

    @property
    def last(self) -> AttemptSpec:
        """The spec in use when the attempt failed. The trainer may have split its batches further
        than the launcher chose."""
        spec = self.attempt.spec
        reached = self.attempt.sizes[-1]
        if reached >= spec.batch_size or not self.settings.accumulates:
            return spec
        return self.rank_settings.resize(spec, self.rank_settings.exact_size(reached))

    @property
    def failed_before_training(self) -> bool:
        """Whether the attempt certainly failed outside of a step, so that the batch does not
        matter.

        For a trainer that reports nothing, the stack is the only evidence.
        """
        if self.evidence.clue == Clue.IMPORT:  # An import may fail at any time.
            return True
        if self.attempt.has_begun:
            return False
        if self.evidence.clue == Clue.MODEL or self.config.is_built_in:
            return True
        return any(attempt.began_training for attempt in self.history)

    # --- GPUs ---

    @property
    def failed_gpus(self) -> Group:
        """The GPU on which the attempt failed, or all of its GPUs if that GPU is unknown."""
        return self.attempt.failed_gpus

    @property
    def gpus_are_available(self) -> bool:
        """Whether the GPUs on which the attempt failed are available again."""
        usable = {gpu.uuid for gpu in self.offers.gpus if gpu.unusable is None}
        return bool(self.last.gpus) and usable.issuperset(uuids(self.failed_gpus))

    @property
    def tried_devices(self) -> frozenset[str]:
        """The UUIDs of the GPUs that had an attempt since the last progress, and ``cpu`` if the CPU
        had an attempt."""
        tried: set[str] = set()
        for attempt in self.since_progress:
            tried.update(uuids(attempt.spec.gpus) or ("cpu",))
        return frozenset(tried)

    @property
    def faulty(self) -> frozenset[str]:
        """The UUIDs of GPUs that the job must not return to after a fault.

        On these GPUs the hardware failed, the same step failed twice, or faults continue without
        progress.
        """
        faulty: set[str] = set()
        seen: set[tuple[tuple[str, ...], int | None]] = set()
        progress_at = len(self.history) - len(self.since_progress)
        for number, attempt in enumerate(self.history):
            if attempt.kind is not FailureKind.DEVICE_FAULT:
                continue
            gpus = uuids(attempt.failed_gpus)
            is_recent = number >= progress_at
            gpus_and_step = (gpus, attempt.end_step)
            is_repeated = gpus_and_step in seen or (is_recent and not self.has_retries)
            if is_repeated or attempt.evidence.is_hardware:
                faulty.update(gpus)
            if is_recent or attempt.end_step is not None:
                seen.add(gpus_and_step)
        return frozenset(faulty)

    def new_in(self, group: Group) -> Group:
        """Return the GPUs of ``group`` that the attempt did not have."""
        return tuple(gpu for gpu in group if gpu not in self.last.gpus)

    # --- micro-batch sizes ---

    @property
    def rank_settings(self) -> PolicySettings:
        """The settings for the number of ranks that the failed attempt had."""
        return self.settings.for_ranks(self.attempt.spec.ranks)

    @property
    def has_smaller(self) -> bool:
        """Whether a smaller micro-batch exists."""
        last = self.last
        return last.has_batch and last.batch_size > self.settings.min_batch_size

    @property
    def smaller(self) -> AttemptSpec:
        """The last spec with the next smaller micro-batch."""
        settings = self.rank_settings
        last = self.last
        return settings.resize(last, settings.next_smaller(last.batch_size))

    @property
    def keeps_batch(self) -> str:
        """The reason why no attempt may split the batch in another way, empty if it may."""
        reasons = [attempt.keeps_batch for attempt in self.history if attempt.keeps_batch]
        return reasons[0] if reasons else ""

    @property
    def keeps_loss(self) -> str:
        """The reason why splitting steps and batches would change the loss. Empty if it would not,
        or if they are split nevertheless."""
        if self.last.noted("splits_loss", False):
            return ""
        reasons = [attempt.split_changes for attempt in self.history if attempt.split_changes]
        return reasons[0] if reasons else ""

    @property
    def sizes_not_tried(self) -> list[int]:
        """The micro-batches below all that were tried, largest first."""
        smallest = min(earlier.sizes[-1] for earlier in self.history)
        return [size for size in list_sizes(self.rank_settings) if size < smallest]

    @property
    def smaller_batches_tried_here(self) -> int:
        """How often a failure without progress reduced the micro-batch on this device."""
        sizes: set[int] = set()
        for attempt in self.since_progress:
            if attempt.spec.device_key == self.last.device_key:
                sizes.add(attempt.spec.batch_size)
        return len(sizes) - 1

    # --- progress and retries ---

    @property
    def since_progress(self) -> tuple[Attempt, ...]:
        """The attempts since the last progress, which is a checkpoint of a later step than before.

        If steps are unknown, a second checkpoint of an attempt is progress, and so is a checkpoint
        with a new name. A single overwritten file is not, because the attempt may have resumed from
        it. A script that starts over each time looks the same, so such progress counts only a few
        times in a row.
        """
        furthest = -1
        progress_at = 0
        presumed = 0
        names: set[str | None] = {None}
        for number, attempt in enumerate(self.history):
            step = max(attempt.start_step, attempt.saved_step or 0)
            is_new = attempt.saves > 1 or attempt.checkpoint not in names
            if step > furthest:
                furthest = step
                progress_at = number
                presumed = 0
            elif attempt.saved_step is None and is_new and presumed < _MOST_PRESUMED:
                progress_at = number
                presumed += 1
            names.add(attempt.checkpoint)
        return self.history[progress_at:]

    @property
    def got_further(self) -> bool:
        """Whether the attempt itself saved a checkpoint beyond all earlier checkpoints."""
        attempt = self.attempt
        if attempt.saved_step is not None:
            has_saved = attempt.saved_step > attempt.start_step
        else:
            # The first checkpoint may be the file from which the job resumed.
            may_be_old = len(self.history) == 1 and attempt.resumed_from is not None
            has_saved = attempt.saves > (1 if may_be_old else 0)
        return has_saved and len(self.since_progress) == 1

    @property
    def failures_without_progress(self) -> int:
        """The number of attempts that failed in this way since the last progress."""
        return sum(earlier.kind is self.failure.kind for earlier in self.since_progress)

    @property
    def has_retries(self) -> bool:
        """Whether ``max_retries`` allows another attempt after this kind of failure."""
        return self.failures_without_progress <= self.config.retries

    @property
    def earlier_at_same_step(self) -> tuple[Attempt, ...]:
        """The earlier attempts that failed in the same way at the same step.

        Before the first step, only attempts since the last progress count, because any attempt may
        fail there once in a while.
        """
        step = self.attempt.end_step
        candidates = self.since_progress if step is None else self.history
        return tuple(
            earlier
            for earlier in candidates[:-1]
            if earlier.kind is self.failure.kind and earlier.end_step == step
        )

    @property
    def unknown_before(self) -> Attempt | None:
        """The previous attempt that failed for an unknown reason at the same place, if no later
        checkpoint was saved since.

        Without steps, a script that starts over each time writes the same checkpoints again and
        seems to advance. So a numbered name that existed before is not progress, and other progress
        counts only ``max_retries`` times.
        """
        recent = _unknown_failures_in(self.since_progress[:-1])
        if recent:
            return recent[-1]
        unknown = _unknown_failures_in(self.history[:-1])
        if not unknown:
            return None
        if any(earlier.saved_step is not None for earlier in self.history):
            return None
        path = self.attempt.checkpoint
        is_rewritten = any(earlier.checkpoint == path for earlier in unknown)
        if is_rewritten and self._is_numbered(path):
            return unknown[-1]
        return unknown[-1] if len(unknown) >= self.config.retries else None

    def _is_numbered(self, path: str | None) -> bool:
        """Return whether a script gives each of its checkpoints another number."""
        if path is None or not any(map(str.isdigit, PurePath(path).name)):
            return False
        pattern = self.config.trainer.checkpoint_glob or "*"
        return glob.has_magic(PurePath(pattern).name)

    # --- checkpoints ---

    @property
    def has_saved(self) -> bool:
        """Whether a recorded checkpoint contains the job's progress."""
        return self._checkpoint is not None

    @property
    def _checkpoint(self) -> str | None:
        """The newest checkpoint that is recorded and complete."""
        incomplete: str | None = self.attempt.noted("not_whole", None)
        for attempt in reversed(self.history):
            path = attempt.checkpoint or attempt.resumed_from
            if path and path != incomplete:
                return path
        return None

    @property
    def saved(self) -> str:
        """Where the next attempt resumes, for a sentence."""
        path = self._checkpoint
        traits = self.config.traits
        pattern = self.config.trainer.checkpoint_glob
        if path is None:
            hint = " (--checkpoint)" if traits.saves_by_itself and pattern is None else ""
            return f"the beginning, because no checkpoint is known{hint}"
        name = PurePath(path).name
        if pattern is not None and not self._command_has_checkpoint:
            return f"the beginning, unless the script finds its checkpoint {name} by itself"
        return f"the last checkpoint, {name}"

    @property
    def _command_has_checkpoint(self) -> bool:
        """Whether a script's command contains the checkpoint to resume from."""
        trainer = self.config.trainer
        words = " ".join(trainer.argv or ())
        return bool(trainer.resume_argv) or "checkpoint" in placeholders_in(words)

    # --- the retry and its reason ---

    @property
    def at_size(self) -> str:
        """The micro-batch in a sentence, empty for a script without a batch."""
        return f" at micro-batch {self.last.batch_size}" if self.last.has_batch else ""

    @property
    def what_failed(self) -> str:
        """The failure and its place, as the start of a reason."""
        failure = self.failure
        device = device_name(self.failed_gpus)
        if self.last.gpus and not self.failed_gpus:
            device = "another node"
        rank = "" if failure.rank is None else f" (rank {failure.rank})"
        match failure.kind:
            case FailureKind.DEVICE_OOM:
                if not self.last.gpus:
                    device = "the GPU"  # No GPU was reserved, so the process chose one itself.
                limit = ""
                if self.evidence.own_limit:
                    limit = " at this job's own limit (memory.fraction)"
                return f"out of memory on {device}{rank}{limit}{self._why_not_split}"
            case FailureKind.HOST_OOM:
                return f"out of memory on the host{rank}{self._why_not_split}"
            case FailureKind.DEVICE_FAULT:
                return f"{device} failed ({failure.message})"
            case FailureKind.SETUP:
                return f"CUDA does not work on {device} ({failure.message})"
            case FailureKind.DEVICE_UNAVAILABLE:
                return f"{device} is not available ({failure.message})"
            case FailureKind.DISK_FULL:
                # torch's message only says that a file is shorter than expected.
                return f"{failure.kind.in_words} ({failure.message})"
        return failure.message

    @property
    def _why_not_split(self) -> str:
        """The reason why the step was not repeated in parts, in brackets. Empty if unknown."""
        why = self.attempt.noted("cannot_split", "")
        return f" ({why})" if why else ""

    def retry(
        self,
        action: str,
        how: str,
        *knobs: Knob,
        pause_seconds: float = 0.0,
        room: Room | None = None,
        batch_size: int | None = None,
        **changes: Any,
    ) -> Retry:
        """Return the retry of the last spec with some changes.

        Args:
            action: the remedy's name in records.
            how: how the job continues. The reason consists of the failure and this text.
            knobs: the features' values to change.
            pause_seconds: the pause before the attempt.
            room: the free memory to wait for, None to start at once.
            batch_size: the micro-batch, None to keep it.
            changes: fields of the spec to change.
        """
        spec = replace(self.last, **changes).having(*knobs)
        if batch_size is not None:
            spec = self.settings.for_ranks(spec.ranks).resize(spec, batch_size)
        reason = self.what_failed + how
        return Retry(spec, action, reason, warn_of_changes(self, spec), pause_seconds, room)


def _unknown_failures_in(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that failed for an unknown reason."""
    return [attempt for attempt in attempts if attempt.evidence.clue == Clue.UNKNOWN]
