"""One attempt while it trains, as our own code sees it; its trainer sees :class:`.run.Run`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from robust_train.attempt.cadence import Saving
from robust_train.attempt.data_position import Attempt
from robust_train.attempt.guard import REPORTED, Guard
from robust_train.attempt.hooks import AttemptHooks
from robust_train.attempt.last_save import save_owed_checkpoint, write_when_there_is_room
from robust_train.attempt.speed import SpeedMeter
from robust_train.config.placeholders import MicroBatchPlan as MicroBatchPlan
from robust_train.config.placeholders import SavePlan, SplitRule
from robust_train.files import plain
from robust_train.folder.checkpoints import CheckpointError, Content, Position
from robust_train.host.votes import CHECKPOINT, STOP, Flags, OneRank
from robust_train.memory.stats import describe_memory
from robust_train.memory.stats import memory_in_use as memory_in_use
from robust_train.model.errors import TrainingDiverged, TrainingStopped
from robust_train.model.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochEnded,
    Event,
    Json,
    MemoryReported,
    MicroBatchChanged,
    MicroBatchExhausted,
    Progress,
    SpeedMeasured,
    SplitChecked,
    TrainingStarted,
    UserEvent,
    ValueReported,
)
from robust_train.model.failure import Evidence, Failure, FailureKind

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from robust_train.attempt.checkpoints import CheckpointFolder
    from robust_train.config.schema import RobustConfig
    from robust_train.model.spec import AttemptSpec
    from robust_train.policy.sizes import BatchSearch
    from robust_train.step.batcher import MicroBatcher
    from robust_train.step.rewind import Models
    from robust_train.step.split_check import SplitCheck

log = logging.getLogger("robust_train")

_PROGRESS_INTERVAL_SECONDS = 0.1

T = TypeVar("T")

Report = Callable[[Event], None]
"""Takes one event."""

Answer = Callable[[dict[str, Json]], None]
"""Takes the reply to a request that was made of a live run."""


class LiveAttempt:
    """One attempt while it trains; what the trainer calls is described in :class:`.run.Run`.

    Attributes:
        attempt: number of this attempt, counted from 1.
        rank: number of this process among those that share the optimizer steps, from 0.
        run_dir: the job's run folder.
        checkpoint_dir: where checkpoints belong; shared by all attempts of the job.
        resume_checkpoint: the checkpoint to go on from, None if it starts afresh.
        saving: when the next checkpoint is due, and what was saved.
        speed: measures how fast the steps follow each other.
        steps_before: optimizer steps that earlier attempts have done, 0 for a fresh start.
        asked: the split of the batch that the job was asked for; None: this attempt's own.
        keeps_batch: why no attempt may split the batch in another way; empty if it may.
        last_step: last optimizer step that was reported, None before the first.
        last_micro_batch: the smallest micro-batch that running out of memory has led to inside the
            steps of this attempt, None if it never did.
        skips_to: the data up to this optimizer step are to be passed over: training has diverged
            there.
        passes_over: whether the trainer heeds that.
        is_steered: a framework's trainer goes on from its checkpoints.
        is_cooperative: the trainer has called :meth:`should_stop` or :meth:`should_save`.
        saves_on_request: it has called :meth:`should_save`.
        was_told_to_stop: :meth:`should_stop` has returned true.
        hooks: the features that take part; set by whoever calls the trainer.
        guard: watches whether what it trains is of use.
        has_live_status: the launcher shows steps and loss on a terminal.
        send: sends an event to the launcher.
        micro_batch_plan: how :meth:`backward` begins; set by whoever calls the trainer.
        batch_search: the same.
        has_read: the same; returns whether the trainer has read a key that ends like this.
        supports: the same; returns whether the trainer supports a feature.
        world_size: how many ranks share the optimizer steps. Only rank 0's progress, checkpoints,
            epochs and result count; the others may report them as well.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        attempt: int = 1,
        resume_checkpoint: Path | None = None,
        report: Report = lambda event: None,
        rank: int = 0,
        world_size: int = 1,
        flags: Flags | None = None,
        has_live_status: bool = False,
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.run_dir = run_dir
        self.checkpoint_dir = run_dir / "checkpoints"
        self.resume_checkpoint = resume_checkpoint
        self.send = report
        self.world_size = world_size
        self.has_live_status = has_live_status
        self.steps_before = 0
        self.last_step: int | None = None
        self.last_micro_batch: int | None = None
        self.asked: AttemptSpec | None = None
        self.keeps_batch = ""
        self.their_keys: Mapping[str, str] | None = None
        self.skips_to = 0
        self.passes_over = self.is_steered = False
        self.is_cooperative = self.saves_on_request = False
        self.was_told_to_stop = False
        self._asks_whether_to_stop = self._saves_last = False
        self._total_steps: int | None = None
        self.hooks = AttemptHooks()
        self.batch_search: BatchSearch | None = None
        self.has_read: Callable[[str], bool] = lambda key: True
        self.supports: Callable[[str], bool] = lambda feature: False
        self.guard = Guard(lambda event: self.send(event), self._spoiled, is_main=self.is_main)
        self.saving = Saving(run_dir, attempt, self.guard.proves)
        self.speed = SpeedMeter(
            world_size, self._samples, lambda speed: self.send(SpeedMeasured(speed, rank))
        )
        self._objective = ""
        self._mode: str | None = None
        self.micro_batch_plan = MicroBatchPlan()
        self.split_rule = SplitRule()
        self.before_splitting: Callable[[], None] = lambda: None
        self._micro_batcher: MicroBatcher | None = None
        self._folder: CheckpointFolder | None = None  # of `save`
        self.keeps = 2  # checkpoints of `save`
        self._has_resumed = False
        self._flags = flags or OneRank()
        self._checkpoint_flag_seen = 0
        self._checkpoint_answers: list[Answer] = []
        self._unsent: Progress | None = None
        self._next_progress = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which saves the checkpoints and reports."""
        return self.rank == 0

    def should_stop(self) -> bool:
        """See :meth:`.run.Run.should_stop`."""
        self._asks_whether_to_stop = True
        self.hooks.boundary("should_stop")
        stops = self._sees_stop()
        self.was_told_to_stop |= stops
        return stops

    def _sees_stop(self) -> bool:
        self.is_cooperative = True
        return bool(self._flags.look(STOP, self.rank))

    def request_stop(self) -> None:
        """Ask the trainer to stop at its next step boundary."""
        self._flags.raise_flag(STOP)

    def request_checkpoint(self, answer: Answer) -> None:
        """Ask for a checkpoint; ``answer`` gets ``{"answer": …}`` or ``{"error": …}``."""
        self._checkpoint_answers.append(answer)

    def withdraw_checkpoint_request(self, answer: Answer) -> None:
        """Forget a request, where it was not answered yet."""
        if answer in self._checkpoint_answers:
            self._checkpoint_answers.remove(answer)

    def answer_checkpoint(self, reply: dict[str, Json]) -> None:
        """Answer all requests for a checkpoint."""
        answers, self._checkpoint_answers = self._checkpoint_answers, []
        for answer in answers:
            answer(reply)

    def should_save(self) -> bool:
        """See :meth:`.run.Run.should_save`."""
        self.saves_on_request = True
        self._end_after_last_checkpoint()
        is_time = self.is_main and self.saving.clock.is_due(self.last_step)
        # of weights worth nothing: a framework's own rotation would remove a good one for it
        if is_time and not self.guard.losses.not_finite:
            self._flags.raise_flag(CHECKPOINT)
        self.hooks.boundary("should_save")
        if self._checkpoint_answers:
            self._flags.raise_flag(CHECKPOINT)
        before = self._checkpoint_flag_seen
        self._checkpoint_flag_seen = self._flags.look(CHECKPOINT, self.rank)
        is_due = self._checkpoint_flag_seen > before
        if self._sees_stop() and not self._saves_last:
            self._saves_last = is_due = True
        if is_due:
            self.saving.clock.begin(self.last_step)
            self.speed.pause()
        return is_due

    def _end_after_last_checkpoint(self) -> None:
        """End a trainer that does not know that it is to stop, once it has saved for that."""
        if self._saves_last and not self._asks_whether_to_stop:
            self.finish_saving()
            raise TrainingStopped(f"stopped after step {self.steps_done}")

    def checkpoint_failed(self, reason: str) -> None:
        """See :meth:`.run.Run.checkpoint_failed`."""
        self._owe(CheckpointError(reason))

    def _owe(self, error: CheckpointError) -> None:
        """Record and report a checkpoint that could not be saved."""
        if self.is_main:
            self.saving.failed(error)
            self.send(CheckpointFailed(str(error)))
        self.answer_checkpoint({"error": f"no checkpoint: {error}"})

    def started(self, step: int) -> None:
        """See :meth:`.run.Run.started`."""
        self.steps_before = step = int(step)
        self.send(TrainingStarted(step))

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """See :meth:`.run.Run.progress`."""
        self.last_step = step = int(step)
        self.speed.step_done(step)
        self.hooks.boundary("progress")
        self.finish_saving(wait=False)
        if (loss := scalars.get("loss")) is not None:
            self.guard.take(step, loss, REPORTED)
        total = None if total_steps is None else int(total_steps)
        self._total_steps = total
        self._unsent = Progress(step, total, scalars)
        now = time.monotonic()
        if now < self._next_progress:
            return False
        self._next_progress = now + _PROGRESS_INTERVAL_SECONDS
        self.send_last_progress()
        self.hooks.boundary("reported")
        return True

    def send_last_progress(self) -> None:
        """Pass on the last report, unless that is done."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            self.send(replace(unsent, metrics=plain(unsent.metrics)))

    def splits_no_more(self) -> None:
        """Refuse requests for a smaller micro-batch from here on."""
        self._micro_batcher = None

    def configure(self, config: RobustConfig) -> None:
        """Split batches, save and log as an attempt's config has it."""
        self.micro_batch_plan = MicroBatchPlan.of(config)
        self.saving.plan = SavePlan.of(config)
        self.keeps = config.training.keep_checkpoints
        self._objective = config.objective or ""
        self.their_keys = config.theirs
        self.guard.configure(config)

    @property
    def micro_batcher(self) -> MicroBatcher:
        """What splits this attempt's batches; made from :attr:`micro_batch_plan` at first use."""
        if self._micro_batcher is None:
            self.before_splitting()
            # torch comes with it, and the launcher does without
            from robust_train.step.batcher import MicroBatcher
            from robust_train.step.engine import Recorder
            from robust_train.step.split_watch import SplitWatch

            recorder = Recorder(
                lambda: 1 + self.steps_done,
                self._micro_batch_event,
                self.hooks.ran_out,
                self.speed,
                SplitWatch(self.split_rule, self._on_split_checked, self._muted),
            )
            self._micro_batcher = MicroBatcher(
                **asdict(self.micro_batch_plan), search=self.batch_search, recorder=recorder
            )
        return self._micro_batcher

    def shrink(self, reason: str) -> tuple[int, int] | None:
        """Split finer from the next batch on; return (from, to), or None if no size is smaller."""
        return self.micro_batcher.shrink(reason)

    def backward(
        self, loss_of: Callable[[Any], Any], batch: Any, model: Models = None, **options: Any
    ) -> Any:
        """See :meth:`.run.Run.backward`."""
        self._end_after_last_checkpoint()
        batcher = self.micro_batcher
        self.hooks.boundary("backward")
        result = batcher.backward(loss_of, batch, model, **options)
        if options.get("training", True):
            self.guard.computed(
                1 + self.steps_done, result[0] if isinstance(result, tuple) else result
            )
        return result

    def step(
        self, optimizer: Optimizer, scaler: Any = None, max_grad_norm: float | None = None
    ) -> bool:
        """See :meth:`.run.Run.step`."""
        return self.guard.step(1 + self.steps_done, optimizer, scaler, max_grad_norm)

    def forward(
        self, function: Callable[[Any], T], batch: Any, model: Models = None, **options: Any
    ) -> list[T]:
        """See :meth:`.run.Run.forward`."""
        batcher = self.micro_batcher
        self.hooks.boundary("forward")
        return batcher.forward(function, batch, model, **options)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """See :meth:`.run.Run.batches`."""
        return self.speed.waits(self._pass_over(loader))

    def _pass_over(self, loader: Iterable[T]) -> Iterator[T]:
        self.passes_over = True
        self._find_position()
        plan = self.micro_batch_plan
        attempt = Attempt(
            batch_size=plan.batch_size or 0,
            effective=plan.samples or 0,
            reads_batch_size=(self.has_read("batch_size") or bool(self.their_keys)),
            rank=self.rank,
            ranks=self.world_size,
        )
        yield from self.saving.batches.over(loader, attempt)

    def _find_position(self) -> None:
        """Find where an earlier attempt was in the data, with the first batch or checkpoint: by
        then the trainer has reported where it begins."""
        if self.resume_checkpoint is not None and not self._has_resumed:
            self.saving.batches.resume(self.resume_checkpoint, self.steps_before, self.skips_to)
        self._has_resumed = True

    @property
    def splits_batches(self) -> bool:
        """Whether the trainer has begun to use :meth:`backward` or :meth:`forward`."""
        return self._micro_batcher is not None

    def _samples(self) -> int:
        counts = self.has_read("batch_size")
        return (self.micro_batch_plan.samples or 0) if counts else 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done, those of earlier attempts included."""
        return self.steps_before if self.last_step is None else self.last_step

    @property
    def is_done(self) -> bool:
        """Whether the last of all optimizer steps is done, as far as the trainer reports them."""
        total = self._total_steps
        return total is not None and self.steps_done >= total

    def _on_split_checked(self, step: int, check: SplitCheck, ends_attempt: bool) -> None:
        kept = check.kept.value
        self.send(SplitChecked(step, kept, check.message, check.samples, ends_attempt))

    @contextlib.contextmanager
    def _muted(self) -> Iterator[None]:
        """Send nothing that a trainer's function reports within the block."""
        send = self.send
        unsent = self._unsent
        self.send = lambda event: None
        try:
            yield
        finally:
            self.send = send
            self._unsent = unsent

    def _micro_batch_event(self, event: Event) -> None:
        if isinstance(event, (MicroBatchChanged, MicroBatchExhausted)):
            if event.training:
                size = getattr(event, "after", None) or event.before
                self.last_micro_batch = min(size, self.last_micro_batch or size)
            event = replace(event, last_micro_batch=self.last_micro_batch)
        self.send(event)

    def save(self, state: Mapping[str, Any], step: int) -> None:
        """See :meth:`.run.Run.save`."""
        from robust_train.attempt.checkpoints import contents_of

        if self.is_main:
            self.save_content(contents_of(state, int(step)), int(step), keep=self.keeps)

    def save_content(self, content: Content, step: int, *, keep: int, suffix: str = ".pt") -> None:
        """Save a dictionary of values and tensors, as a framework has gathered it, as above."""
        # the one before may have failed in the meantime, which is no reason to leave this one out
        self.finish_saving()
        self.saving.clock.begin(step)
        self.speed.pause()
        self._find_position()
        is_first = self._folder is None
        folder = self.checkpoints(keep, suffix)
        if is_first:
            folder.remove_leftovers(self.resume_checkpoint)
        self.try_to_save(lambda: folder.save_from_copy(content, step))

    def checkpoints(self, keep: int, suffix: str = ".pt", **options: Any) -> CheckpointFolder:
        """Return what writes and reports checkpoints; for the arguments see there."""
        from robust_train.attempt.checkpoints import CheckpointFolder

        if self._folder is None:
            self._folder = CheckpointFolder(
                self.saving,
                self.checkpoint_saved,
                is_main=self.is_main,
                keep=keep,
                suffix=suffix,
                **options,
            )
        return self._folder

    def load(self, state: MutableMapping[str, Any]) -> int:
        """See :meth:`.run.Run.load`."""
        from robust_train.attempt.checkpoints import STEP, read_newest, restore
        from robust_train.step.ranks import of_all_ranks

        step, path = 0, self.resume_checkpoint
        self.resume_checkpoint = None
        if path is not None:
            required = {STEP} | state.keys()
            found = read_newest(path, required, gather=of_all_ranks)
            if found is not None:
                self.resume_checkpoint, content = found
                step = restore(state, content)
        self.started(step)
        return step

    def _spoiled(self, message: str, good: int | None, bad: int) -> TrainingDiverged:
        """Have no attempt resume from what was saved since the good step; return the error."""
        begun = self.steps_before
        if good is None or good <= begun:
            # none was good in this attempt: so may be what it resumed from
            good = begun - 1
        self.finish_saving()
        # each rank: that of any may be the one that counts
        before = self.saving.spoiled(good, self.guard.good_since)
        last = "no checkpoint before it"
        if before is not None:
            step = "" if before.step is None else f" (step {before.step})"
            last = f"the checkpoint before it is {before.path.name}{step}"
            # from there its data was passed over already
            if self.passes_over and before.step == begun:
                bad += max(self.skips_to - begun, 0)
        evidence = Evidence(
            good_step=good,
            bad_step=bad,
            has_checkpoint=before is not None,
            passes_over=self.passes_over,
            reads_lr=self.has_read("lr"),
        )
        return TrainingDiverged(Failure(FailureKind.DIVERGED, f"{message}; {last}", evidence))

    def finish_saving(self, *, wait: bool = True) -> None:
        """Report the checkpoint that is written in the background; ``wait`` until it is."""
        if (folder := self._folder) is not None:
            self.try_to_save(lambda: folder.report_written(wait=wait))

    def try_to_save(self, write: Callable[[], object]) -> None:
        """Write a checkpoint; go on if the disk does not take it."""
        try:
            write()
        except CheckpointError as error:
            if self.is_main:
                kept = (
                    "earlier checkpoints are kept" if self.has_checkpoint else "none is saved yet"
                )
                log.warning("%s; training goes on, %s", error, kept)
            self._owe(error)

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the job is on the disk, as far as this attempt knows."""
        return self.saving.has_saved or self.resume_checkpoint is not None

    def save_owed_checkpoint(self) -> None:
        """Save the last checkpoint of training that is over, if the disk did not take it."""
        if self.saving.owed is not None and not self.was_told_to_stop:
            save_owed_checkpoint(self, None if self._folder is None else self._folder.write_again)

    def save_result(self, write: Callable[[], T]) -> T:
        """Return what ``write`` returns, which writes the weights that training has ended with.

        They are the result, so no checkpoint is owed after that. A full disk is waited for.
        """
        result = write_when_there_is_room(self, write)
        if self.saving.owed is not None:
            log.warning("the last checkpoint is not saved, but the trained weights are")
            self.saving.owed = None
        return result

    def checkpoint_saved(
        self, path: Path, step: int | None, position: Position | None = None
    ) -> None:
        """See :meth:`.run.Run.checkpoint_saved`."""
        self.send_last_progress()
        step = self.last_step if step is None else int(step)
        loss, spent = self.guard.losses.of_checkpoint(step), 0.0
        if self.is_main:
            damage, at = "", position
            if at is None:
                self._find_position()
                damage = self.saving.damage_in(Path(path))
                at = self.saving.batches.position
            self.saving.saved(Path(path), step, loss, at, is_good=not damage)
            if damage:
                log.warning("checkpoint %s: %s; it is not used", path, damage)
                self.checkpoint_failed(damage)
                return
            spent = round(self.saving.clock.spent, 3)
        self.send(
            CheckpointSaved(str(path), step, loss, self.saving.rotates and loss != "unknown", spent)
        )
        self.speed.pause()
        self.hooks.pause("save")
        if self._checkpoint_answers:
            self.answer_checkpoint({"answer": {"path": str(path), "step": step}})

    def epoch_ended(self, /, epoch: int, **scalars: float) -> None:
        """See :meth:`.run.Run.epoch_ended`."""
        epoch, figures = int(epoch), plain(scalars)
        self.send_last_progress()
        self.send(EpochEnded(epoch, self.steps_done, figures))
        self.report_objective(figures, epoch)
        self.speed.pause()
        self.hooks.pause("epoch")

    def report(self, value: float, step: int | None = None) -> None:
        """See :meth:`.run.Run.report`."""
        if self.is_main:
            step = self.steps_done if step is None else int(step)
            self.send(ValueReported(float(value), step))

    def record_memory(self, name: str) -> None:
        """Record how much memory is in use."""
        figures = memory_in_use(context=False)
        log.debug("%s: %s", name, describe_memory(figures))
        self.send(MemoryReported(name, **figures))

    def record(self, event: str, fields: Mapping[str, Json]) -> None:
        """See :meth:`.run.Run.record`."""
        figures = plain(dict(fields))
        self.send(UserEvent(str(event), figures))
        self.report_objective(figures, figures.get("step"))

    def report_objective(self, figures: Mapping[str, Json], step: Json) -> None:
        """Report the figure that ``objective`` names, if it is among these."""
        value = figures.get(self._objective)
        if (
            self.is_main
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
            and isinstance(step, int)
        ):
            self.send(ValueReported(float(value), step, self._mode))

    def monitors(self, figure: str, mode: str) -> None:
        """Report the figure whenever it is recorded, unless ``objective`` names another one.
        ``mode``: ``min`` or ``max``, what its framework takes for the best."""
        if not self._objective:
            self._objective, self._mode = figure, mode
