"""The evidence that a rule may use after a failure.

:func:`.decide.decide` creates a `FailureContext` for each failure, in the launcher, and
hands it to each rule. Pure.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from robust_train.config.placeholders import placeholders_in
from robust_train.config.schema import RobustConfig
from robust_train.model.attempt import Attempt
from robust_train.model.failure import Clue, Evidence, Failure, FailureKind
from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.spec import AttemptSpec, Knob, Retry, Room
from robust_train.policy.sizes import PolicySettings, sizes
from robust_train.readable import MIB

_NOTABLE_BYTES = 256 * MIB
"""If other processes took at least this many bytes, they are blamed for running out of memory."""

# A share of the GPU, used in the same way if the size of the failed request is unknown.
_NOTABLE_SHARE = 0.1

_MOST_PRESUMED = 20
"""How many attempts in a row may count as progress although their steps are unknown."""


@dataclass(frozen=True)
class Offers:
    """The devices that the next attempt may have now."""

    # GPUs that could be taken, best first, including the job's own.
    gpus: tuple[GpuInfo, ...] = ()
    # GPUs that the job may use, but that other jobs hold.
    held: tuple[GpuInfo, ...] = ()


@dataclass(frozen=True)
class FailureContext:
    """A failure and all that happened before it."""

    settings: PolicySettings  # the user's settings
    # Every attempt so far. The last attempt failed.
    history: tuple[Attempt, ...]
    offers: Offers

    @property
    def config(self) -> RobustConfig:
        """The job's config."""
        return self.settings.config

    @property
    def attempt(self) -> Attempt:
        """The attempt that failed."""
        return self.history[-1]

    @property
    def last(self) -> AttemptSpec:
        """The spec in use when the attempt failed. A trainer may have split its batches further."""
        spec = self.attempt.spec
        reached = self.attempt.sizes[-1]
        if reached >= spec.batch_size or not self.settings.accumulates:
            return spec
        return self.sizes.resized(spec, self.sizes.exact_size(reached))

    @property
    def has_smaller(self) -> bool:
        """Whether a smaller micro-batch than that exists."""
        last = self.last
        return last.has_batch and last.batch_size > self.settings.min_batch_size

    @property
    def smaller(self) -> AttemptSpec:
        """The same spec with the next smaller micro-batch."""
        ranks = self.sizes
        last = self.last
        return ranks.resized(last, ranks.next_smaller(last.batch_size))

    @property
    def saved(self) -> str:
        """Where the next attempt resumes, for a sentence."""
        path = self._checkpoint
        if path is not None and self._resumes_by_itself_if_at_all:
            return (
                "the beginning, unless the script finds its checkpoint "
                f"{PurePath(path).name} by itself"
            )
        if path is not None:
            return f"the last checkpoint, {PurePath(path).name}"
        has_no_pattern = self.config.trainer.checkpoint_glob is None
        is_asked = self.config.traits.saves_by_itself and has_no_pattern
        hint = " (--checkpoint)" if is_asked else ""
        return f"the beginning, for no checkpoint is known{hint}"

    @property
    def _resumes_by_itself_if_at_all(self) -> bool:
        """Whether a script has a pattern for its checkpoints, but none was passed to it."""
        trainer = self.config.trainer
        words = " ".join(trainer.argv or ())
        is_given = trainer.resume_argv or "checkpoint" in placeholders_in(words)
        return trainer.checkpoint_glob is not None and not is_given

    @property
    def _checkpoint(self) -> str | None:
        """The newest checkpoint that is recorded and undamaged."""
        paths = [earlier.checkpoint or earlier.resumed_from for earlier in reversed(self.history)]
        cut: str | None = self.attempt.noted("not_whole", None)
        return next((path for path in paths if path and path != cut), None)

    @property
    def has_saved(self) -> bool:
        """Whether a recorded checkpoint holds the job's progress."""
        return self._checkpoint is not None

    @property
    def unknown_before(self) -> Attempt | None:
        """The previous attempt that failed for an unknown reason at the same place, if no later
        checkpoint was saved since.

        Without steps, a script that starts over each time writes the same checkpoints again and
        seems to advance. So a numbered name that existed before is not progress, and other progress
        counts ``max_retries`` times only.
        """
        recent = _unknown_of(self.since_progress[:-1])
        if recent:
            return recent[-1]
        unknown = _unknown_of(self.history[:-1])
        if not unknown:
            return None
        if any(earlier.saved_step is not None for earlier in self.history):
            return None
        path = self.attempt.checkpoint
        pattern = self.config.trainer.checkpoint_glob or "*"
        is_numbered = (
            path is not None
            and any(map(str.isdigit, PurePath(path).name))
            and glob.has_magic(PurePath(pattern).name)
        )
        is_same = any(earlier.checkpoint == path for earlier in unknown)
        is_often = len(unknown) >= self.config.retries
        return unknown[-1] if (is_numbered and is_same) or is_often else None

    @property
    def at_size(self) -> str:
        """The micro-batch in a sentence, empty for a script that gets none."""
        return f" at micro-batch {self.last.batch_size}" if self.last.has_batch else ""

    @property
    def keeps_batch(self) -> str:
        """Why no attempt may split the batch in another way, empty if it may."""
        return next((a.keeps_batch for a in self.history if a.keeps_batch), "")

    @property
    def keeps_loss(self) -> str:
        """Why steps and batches are not split for now: it would change the loss. Empty if they may
        be."""
        if self.last.noted("splits_loss", False):
            return ""
        return next((a.split_changes for a in self.history if a.split_changes), "")

    @property
    def sizes(self) -> PolicySettings:
        """The settings for the ranks of the attempt that failed."""
        return self.settings.for_ranks(self.attempt.spec.ranks)

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
    def failed_gpus(self) -> Group:
        """The GPU on which the attempt failed; all of its GPUs if that is unknown."""
        return self.attempt.failed_gpus

    @property
    def gpus_are_available(self) -> bool:
        """Whether the GPUs on which the attempt failed could be taken again now."""
        usable = {gpu.uuid for gpu in self.offers.gpus if gpu.unusable is None}
        return bool(self.last.gpus) and usable.issuperset(uuids(self.failed_gpus))

    @property
    def failed_before_training(self) -> bool:
        """Whether the attempt certainly failed outside of a step, so that the batch does not
        matter.

        For a trainer that reports nothing, the stack is the only evidence.
        """
        if self.evidence.clue == Clue.IMPORT:  # an import may fail at any time
            return True
        if self.attempt.has_begun:
            return False
        return (
            self.evidence.clue == Clue.MODEL
            or self.config.is_built_in
            or any(attempt.began_training for attempt in self.history)
        )

    @property
    def sizes_not_tried(self) -> list[int]:
        """The micro-batches below all that were tried, largest first."""
        smallest = min(earlier.sizes[-1] for earlier in self.history)
        return [size for size in sizes(self.sizes) if size < smallest]

    @property
    def tried_devices(self) -> frozenset[str]:
        """UUIDs of the GPUs that had an attempt since progress, and ``cpu`` if the CPU had an
        attempt."""
        return frozenset(key for a in self.since_progress for key in uuids(a.spec.gpus) or ("cpu",))

    @property
    def since_progress(self) -> tuple[Attempt, ...]:
        """The attempts since the last progress, which is a checkpoint of a later step than before.

        Without steps a second checkpoint counts, and a checkpoint under a new name: a file that is
        overwritten once may be what the attempt resumed from. A script that starts over each time
        looks the same, so this kind of progress counts a few times in a row only.
        """
        furthest = -1
        begins_at = 0
        presumed = 0
        names: set[str | None] = {None}
        for number, attempt in enumerate(self.history):
            step = max(attempt.start_step, attempt.saved_step or 0)
            is_new = attempt.saves > 1 or attempt.checkpoint not in names
            if step > furthest:
                furthest = step
                begins_at = number
                presumed = 0
            elif attempt.saved_step is None and is_new and presumed < _MOST_PRESUMED:
                begins_at = number
                presumed = presumed + 1
            names.add(attempt.checkpoint)
        return self.history[begins_at:]

    @property
    def got_further(self) -> bool:
        """Whether the attempt itself saved a checkpoint beyond all earlier checkpoints."""
        attempt = self.attempt
        step = self.attempt.saved_step
        # Its first checkpoint may be the file that it resumed from.
        may_be_old = len(self.history) == 1 and attempt.resumed_from is not None
        has_saved = attempt.saves > may_be_old if step is None else step > attempt.start_step
        return has_saved and len(self.since_progress) == 1

    @property
    def smaller_batches_tried_here(self) -> int:
        """How often a failure without progress reduced the micro-batch on this device."""
        here = {
            a.spec.batch_size
            for a in self.since_progress
            if a.spec.device_key == self.last.device_key
        }
        return len(here) - 1

    @property
    def has_retries(self) -> bool:
        """Whether the attempt may fail in this way once more before the job advances."""
        return self.failures_without_progress <= self.config.retries

    @property
    def failures_without_progress(self) -> int:
        """How many attempts failed in this way since the last progress."""
        return sum(earlier.kind is self.failure.kind for earlier in self.since_progress)

    @property
    def earlier_at_same_step(self) -> tuple[Attempt, ...]:
        """The earlier attempts that failed in the same way at the same step.

        Before the first step only attempts since the last progress count, because any attempt may
        fail there once in a while.
        """
        step = self.attempt.end_step
        return tuple(
            earlier
            for earlier in (self.since_progress if step is None else self.history)[:-1]
            if earlier.kind is self.failure.kind and earlier.end_step == step
        )

    @property
    def faulty(self) -> frozenset[str]:
        """The UUIDs of GPUs that the job must not return to after a fault.

        On these GPUs the hardware failed, the same step failed twice, or faults continue without
        progress.
        """
        left: set[str] = set()
        seen: set[tuple[tuple[str, ...], int | None]] = set()
        no_progress = not self.has_retries
        progress_at = len(self.history) - len(self.since_progress)
        for number, attempt in enumerate(self.history):
            if attempt.kind is not FailureKind.DEVICE_FAULT:
                continue
            here = uuids(attempt.failed_gpus)
            is_recent = number >= progress_at
            step = (here, attempt.end_step)
            is_again = step in seen or (is_recent and no_progress)
            if is_again or attempt.evidence.is_hardware:
                left.update(here)
            if is_recent or attempt.end_step is not None:
                seen.add(step)
        return frozenset(left)

    def new_in(self, group: Group) -> Group:
        """Return the GPUs of ``group`` that the attempt did not have."""
        return tuple(gpu for gpu in group if gpu not in self.last.gpus)

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
                # A process without a launcher chose the GPU itself.
                where = device if self.last.gpus else "the GPU"
                limit = " at this job's own limit (memory.fraction)"
                own_limit = limit if self.evidence.own_limit else ""
                return f"out of memory on {where}{rank}{own_limit}{self._cannot_split}"
            case FailureKind.HOST_OOM:
                return f"out of memory on the host{rank}{self._cannot_split}"
            case FailureKind.DEVICE_FAULT:
                return f"{device} failed ({failure.message})"
            case FailureKind.SETUP:
                return f"CUDA does not work on {device} ({failure.message})"
            case FailureKind.DEVICE_UNAVAILABLE:
                return f"{device} is not available ({failure.message})"
            case FailureKind.DISK_FULL:
                # torch only notices that its file is shorter than it should be.
                return f"{failure.kind.in_words} ({failure.message})"
        return failure.message

    @property
    def _cannot_split(self) -> str:
        """Why the step was not repeated in parts, in brackets."""
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
        """Return the retry with these changes of the spec. Its reason says what failed, and ``how``
        it continues."""
        spec = replace(self.last, **changes).having(*knobs)
        if batch_size is not None:
            spec = self.settings.for_ranks(spec.ranks).resized(spec, batch_size)
        return Retry(
            spec, action, self.what_failed + how, self.warning_about(spec), pause_seconds, room
        )

    def warning_about(self, spec: AttemptSpec) -> str:
        """Return warnings about changes to the result, each of them only once."""
        warnings = (
            self._about_effective_batch(spec),
            self._about_gradients(spec),
            self._about_position(spec),
        )
        return "; ".join(filter(None, warnings))

    def _about_effective_batch(self, spec: AttemptSpec) -> str:
        """Warn once if the effective batch is no longer the requested effective batch."""
        wanted = self.settings.asked.effective_batch_size
        now = spec.effective_batch_size
        if now in (wanted, self.attempt.spec.effective_batch_size):
            return ""
        change = f"the effective batch size is now {now} instead of {wanted}"
        may_accumulate = self.config.traits.accumulates_by_itself
        if may_accumulate and not self.settings.asked.accumulates:
            change += " if the script does not accumulate by itself"
        if self.config.preserve_effective_batch_size is False:
            return f"{change}: preserve_effective_batch_size is false"
        if not self.settings.asked.accumulates:
            if self.config.trainer.scale_learning_rate is not None:
                was, rate = map(self.config.learning_rate_at, (wanted, now))
                return f"{change}; the learning rate is {rate:.4g} instead of {was:.4g}"
            is_known = any(earlier.spec.effective_batch_size != wanted for earlier in self.history)
            how = _CANNOT_ACCUMULATE if may_accumulate else _HAS_NO_KEY
            return change if is_known else f"{change}: {how}"
        return (
            f"no micro-batch from {self.settings.min_batch_size} to {spec.batch_size} divides the "
            f"effective batch size {wanted}; it is now {now}"
        )

    def _about_position(self, spec: AttemptSpec) -> str:
        """Warn if a script may resume at another sample."""
        was = self.last.batch_size
        now = spec.batch_size
        is_saved = any(earlier.checkpoint or earlier.resumed_from for earlier in self.history)
        finds_its_place = self.config.traits.saves_by_itself
        if not finds_its_place or was == now or not is_saved:
            return ""
        return (
            f"the checkpoint was written with micro-batch {was}, and the script resumes with "
            f"{now}: if it counts batches, and not samples or steps, it resumes at another sample, "
            f"and if it takes its options from the checkpoint, it keeps {was}"
        )

    def _about_gradients(self, spec: AttemptSpec) -> str:
        """Warn before the first attempt whose accumulation may change gradients."""
        requested = self.settings.asked.gradient_accumulation_steps
        now = spec.gradient_accumulation_steps
        is_known = any(
            earlier.spec.gradient_accumulation_steps != requested for earlier in self.history
        )
        divides_by_itself = self.config.traits.accumulates_by_itself
        if not divides_by_itself or is_known or now == requested:
            return ""
        change = f"the script accumulates {now} micro-batches instead of {requested}"
        is_transformers = any(
            _TRANSFORMERS_TRAINER.search(earlier.exit.output) for earlier in self.history
        )
        if not is_transformers:
            return f"{change}: {_DIVIDES}"
        return f"{change}: {_ADDS_UP_MEANS.format(factor=f'{now / requested:g}')}"


def _unknown_of(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that failed for an unknown reason."""
    return [attempt for attempt in attempts if attempt.evidence.clue == Clue.UNKNOWN]


def blamed_on_others(attempt: Attempt) -> tuple[int, int]:
    """Return how much memory other processes took on the GPU, and how much has to be free for the
    same attempt: its own use plus the failed request. (0, 0) if others did not cause the lack of
    memory."""
    evidence = attempt.evidence
    gpus = attempt.failed_gpus
    before: int | None = attempt.noted("gpu_free_before_bytes", None)
    after: int | None = attempt.noted("gpu_free_after_bytes", None)
    # If the job's own limit was reached, the memory of other processes made no difference.
    if before is None or after is None or evidence.own_limit or not gpus:
        return 0, 0
    taken = before - after
    left = evidence.free_bytes or 0
    requested = evidence.requested_bytes
    if requested is None:
        is_theirs = taken >= _NOTABLE_SHARE * gpus[0].total_bytes
    else:
        is_theirs = taken >= _NOTABLE_BYTES and left + taken >= requested
    if not is_theirs:
        return 0, 0
    # The attempt held what became free at its end. If the size of its request is unknown, it needs
    # a margin.
    used = max(after - left, attempt.memory.get("max_allocated", 0))
    needed = max(used, after + _NOTABLE_BYTES) if requested is None else used + requested
    return taken, min(needed, before)


_HAS_NO_KEY = (
    "the project's config has no key for the accumulation. If it has one by another name: "
    "robust.training.gradient_accumulation_steps='${its.name}'; or stop instead: "
    "robust.preserve_effective_batch_size=true"
)

# A frame of its traceback, or the figures that it prints.
_TRANSFORMERS_TRAINER = re.compile(
    r"[/\\]transformers[/\\]trainer\w*\.py\b"
    r"|\{'(?:loss|eval_loss|train_runtime)': [^}]{0,400}'epoch': "
)

_DIVIDES = (
    "gradients stay the same if it divides the loss by that number, and if the loss is a mean over "
    "samples"
)
_ADDS_UP_MEANS = (
    "under transformers' Trainer gradients may be {factor} times as large, where a model takes "
    "num_items_in_batch and ignores it, as BERT for sequence classification does. Write "
    "trainer.model_accepts_loss_kwargs = False before trainer.train() for such a model"
)
_CANNOT_ACCUMULATE = (
    "the script is not given {gradient_accumulation_steps}. Pass that on if it can accumulate; "
    "else scale the learning rate (--learning-rate, --scale-learning-rate and {learning_rate}), "
    "or stop instead: --keep-effective-batch"
)


def exchanged(group: Group, leaving: Group, offers: Sequence[GpuInfo]) -> Group | None:
    """Replace the GPUs in ``leaving`` by the best of ``offers``, or None if there are too few."""
    # None of the GPUs is on this node: it failed on another node.
    if len(offers) < len(leaving) or not leaving:
        return None
    best = iter(offers)
    return tuple(next(best) if gpu in leaving else gpu for gpu in group)


def uuids(gpus: Group) -> tuple[str, ...]:
    """Return the identities of ``gpus``."""
    return tuple(gpu.uuid for gpu in gpus)


def excluded_after(failure: Failure, suspects: Group, answering: Collection[str]) -> dict[str, str]:
    """Return the UUIDs of GPUs that no job of the host should start on now, each with the reason.

    These are the GPU whose hardware failed, if it is known, and GPUs that no longer answer. After
    any other fault a new process can use the same GPU.

    Args:
        failure: of the attempt.
        suspects: the GPUs on which it may have happened.
        answering: UUIDs of the GPUs for which NVML answers now.
    """
    if failure.kind is not FailureKind.DEVICE_FAULT:
        return {}
    if len(suspects) == 1 and failure.evidence.is_hardware:
        return {suspects[0].uuid: failure.message}
    reason = f"does not answer after: {failure.message}"
    return {gpu.uuid: reason for gpu in suspects if gpu.uuid not in answering}
