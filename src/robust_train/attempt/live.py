"""One attempt while it trains: the object behind :class:`.run.Run`, which the trainer sees.

:class:`.run.Run` creates it in the process that trains, one object per rank. Integrations and
features call it directly. It joins the parts of an attempt: reports, requests to stop or save,
batch splitting, checkpoints, speed and losses. Each part has its own file, and they do not know
each other, except that all of them may report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from robust_train.attempt.checkpoint_records import CheckpointRecords
from robust_train.attempt.data_position import BatchFacts
from robust_train.attempt.hooks import AttemptHooks, load_hooks
from robust_train.attempt.losses import REPORTED, LossWatch
from robust_train.attempt.parts import Parts
from robust_train.attempt.reports import Report, Reports
from robust_train.attempt.saves import Saves
from robust_train.attempt.speed import SpeedMeter
from robust_train.attempt.stops import Stops
from robust_train.config.placeholders import MicroBatchPlan, SavePlan, SplitRule
from robust_train.folder.checkpoint_writing import CheckpointError, Content
from robust_train.folder.checkpoints import Position
from robust_train.host.votes import Flags, OneRank
from robust_train.model.errors import TrainingStopped
from robust_train.model.events import CheckpointFailed, CheckpointSaved, SpeedMeasured

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from robust_train.attempt.hooks import InAttempt
    from robust_train.config.attempt import AttemptRequest
    from robust_train.config.schema import RobustConfig
    from robust_train.model.failure import Failure
    from robust_train.model.spec import AttemptSpec, Speed
    from robust_train.step.reachable import Models

log = logging.getLogger("robust_train")

T = TypeVar("T")


class LiveAttempt:
    """One attempt while it trains. :class:`.run.Run` describes the methods that a trainer calls.

    Attributes:
        attempt: number of this attempt, counted from 1.
        rank: number of this process among those that share the optimizer steps, from 0.
        world_size: how many ranks share the optimizer steps. Other ranks than rank 0 may report
            progress, checkpoints, epochs and a result as well; their reports are ignored.
        is_main: whether this is rank 0, which saves the checkpoints and reports.
        run_dir: the job's run folder.
        checkpoint_dir: the folder of the checkpoints, shared by all attempts of the job.
        has_live_status: whether the launcher shows steps and loss on a terminal.
        spec: the attempt's devices and batch, or None in a script's process.
        reports: sends events, and counts the finished steps.
        stops: keeps the requests to stop or to save.
        speed: measures the time per step.
        parts: splits the batches.
        saving: knows when the next checkpoint is due, and records the saved checkpoints.
        saves: loads and saves checkpoints.
        losses: receives losses and makes updates.
        hooks: the features that take part.
        has_read: returns whether the trainer has read a key whose name contains the given text.
        supports: returns whether the trainer supports a feature.
        is_steered: whether a framework's trainer resumes from its own checkpoints.
        their_keys: the project's own names for this package's keys, or None if it has none.
    """

    # Without slots, an assignment to a misspelt name would pass and change nothing.
    __slots__ = (
        "attempt",
        "checkpoint_dir",
        "has_live_status",
        "has_read",
        "hooks",
        "is_main",
        "is_steered",
        "losses",
        "parts",
        "rank",
        "reports",
        "run_dir",
        "saves",
        "saving",
        "spec",
        "speed",
        "stops",
        "supports",
        "their_keys",
        "world_size",
    )

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
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.world_size = world_size
        self.is_main = rank == 0
        self.run_dir = run_dir
        self.checkpoint_dir = run_dir / "checkpoints"
        self.has_live_status = False
        self.spec: AttemptSpec | None = None
        self.has_read: Callable[[str], bool] = lambda key: True
        self.supports: Callable[[str], bool] = lambda feature: False
        self.is_steered = False
        self.their_keys: Mapping[str, str] | None = None
        self.hooks = AttemptHooks()
        self.losses = LossWatch()
        self.reports = Reports(report, is_main=self.is_main)
        self.stops = Stops(flags if flags else OneRank(), rank)
        self.speed = SpeedMeter(world_size, self._samples_per_step, self._report_speed)
        self.parts = Parts(self.reports, self.speed, self._report_memory_shortage)
        self.saving = CheckpointRecords(run_dir, attempt, self._proves)
        self.saves = Saves(
            self.saving,
            self.reports,
            resume_checkpoint,
            is_main=self.is_main,
            report=self.checkpoint_saved,
            report_failure=self._owe,
        )

    # --- before the trainer is called ---

    def prepare(self, request: AttemptRequest) -> None:
        """Let the features of a request take part, and split batches as the request says."""
        self.spec = request.spec
        self.has_live_status = request.has_live_status
        self.hooks = load_hooks(request.features, self, request.config)
        self.parts.set_asked(request.asked)
        self.parts.check_by(SplitRule.of(request.config, request.spec))
        self.saves.skip_to(request.spec.noted("skips_to", 0))

    def take_part(self, features: Iterable[InAttempt]) -> None:
        """Let these features take part instead of earlier features."""
        self.hooks = AttemptHooks(tuple(features))

    def configure(self, config: RobustConfig) -> None:
        """Apply the config's settings for batches, checkpoints and the objective."""
        self.parts.split_by(MicroBatchPlan.of(config))
        self.saving.follow(SavePlan.of(config))
        self.saves.keep_newest(config.training.keep_checkpoints)
        self.reports.optimise(config.objective or "")
        self.their_keys = config.theirs

    def describe_trainer(
        self, has_read: Callable[[str], bool], supports: Callable[[str], bool]
    ) -> None:
        """Set the keys that the trainer reads and the features that it supports."""
        self.has_read = has_read
        self.supports = supports

    def steer(self, plan: SavePlan) -> None:
        """Let a framework's trainer save as ``plan`` says."""
        self.is_steered = True
        self.saving.follow(plan)

    def watch(self, losses: LossWatch) -> None:
        """Pass losses and updates through ``losses``."""
        self.losses = losses

    # --- connections between the parts ---

    def _report_speed(self, speed: Speed) -> None:
        self.reports.send(SpeedMeasured(speed, self.rank))

    def _report_memory_shortage(self, error: BaseException, failure: Failure) -> None:
        self.hooks.ran_out(error, failure)

    def _proves(self, step: int) -> bool:
        return self.losses.proves(step)

    def _samples_per_step(self) -> int:
        """Return the samples of this rank in an optimizer step, 0 if unknown."""
        if not self.has_read("batch_size"):
            return 0
        return self.parts.plan.samples or 0

    # --- a step ---

    def backward(
        self, loss_of: Callable[[Any], Any], batch: Any, model: Models = None, **options: Any
    ) -> Any:
        """See :meth:`.run.Run.backward`."""
        self._end_after_last_checkpoint()
        batcher = self.parts.batcher()
        self.hooks.boundary("backward")
        result = batcher.backward(loss_of, batch, model, **options)
        if options.get("training", True):
            loss = result[0] if isinstance(result, tuple) else result
            self.losses.computed(1 + self.reports.steps_done, loss)
        return result

    def step(
        self, optimizer: Optimizer, scaler: Any = None, max_grad_norm: float | None = None
    ) -> bool:
        """See :meth:`.run.Run.step`."""
        number = 1 + self.reports.steps_done
        return self.losses.step(number, optimizer, scaler, max_grad_norm)

    def forward(
        self, function: Callable[[Any], T], batch: Any, model: Models = None, **options: Any
    ) -> list[T]:
        """See :meth:`.run.Run.forward`."""
        batcher = self.parts.batcher()
        self.hooks.boundary("forward")
        return batcher.forward(function, batch, model, **options)

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """See :meth:`.run.Run.progress`."""
        step = int(step)
        self.reports.reach(step)
        self.speed.step_done(step)
        self.hooks.boundary("progress")
        self.saves.finish(wait=False)
        loss = scalars.get("loss")
        if loss is not None:
            self.losses.take(step, loss, REPORTED)
        if total_steps is not None:
            total_steps = int(total_steps)
        was_sent = self.reports.progress(step, total_steps, scalars)
        if was_sent:
            self.hooks.boundary("reported")
        return was_sent

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """See :meth:`.run.Run.batches`."""
        remaining = self.saves.pass_over(loader, self._batch_facts)
        return self.speed.measure_waits(remaining)

    def _batch_facts(self) -> BatchFacts:
        """Return the facts about the batches that are known before the first batch."""
        plan = self.parts.plan
        return BatchFacts(
            batch_size=plan.batch_size or 0,
            effective=plan.samples or 0,
            reads_batch_size=self.has_read("batch_size") or bool(self.their_keys),
            rank=self.rank,
            ranks=self.world_size,
        )

    def epoch_ended(self, /, epoch: int, **scalars: float) -> None:
        """See :meth:`.run.Run.epoch_ended`."""
        self.reports.epoch_ended(int(epoch), scalars)
        self.speed.pause()
        self.hooks.pause("epoch")

    # --- to stop, to save ---

    def should_stop(self) -> bool:
        """See :meth:`.run.Run.should_stop`."""
        self.stops.note_question()
        self.hooks.boundary("should_stop")
        return self.stops.read_stop()

    def should_save(self) -> bool:
        """See :meth:`.run.Run.should_save`."""
        self.stops.note_saving()
        self._end_after_last_checkpoint()
        last_step = self.reports.last_step
        is_time = self.is_main and self.saving.clock.is_due(last_step)
        # Do not save non-finite weights: a framework that rotates checkpoints would remove a good
        # checkpoint.
        if is_time and self.losses.allows_checkpoint():
            self.stops.raise_checkpoint()
        self.hooks.boundary("should_save")
        is_due = self.stops.read_checkpoint(is_writing=self.saves.is_writing)
        if is_due:
            self.saving.clock.begin(self.reports.last_step)
            self.speed.pause()
        return is_due

    def _end_after_last_checkpoint(self) -> None:
        """End a trainer that never calls :meth:`should_stop`, once it has saved for a stop.

        Raises:
            TrainingStopped: it has.
        """
        if self.stops.is_past_last_checkpoint:
            self.saves.finish()
            step = self.reports.steps_done
            raise TrainingStopped(f"stopped after step {step}")

    def load(self, state: MutableMapping[str, Any]) -> int:
        """See :meth:`.run.Run.load`."""
        step = self.saves.load(state)
        self.reports.started(step)
        return step

    def save(self, state: Mapping[str, Any], step: int, metric: float | None, mode: str) -> None:
        """See :meth:`.run.Run.save`."""
        from robust_train.attempt.checkpoint_content import build_content

        if self.is_main:
            content = build_content(state, int(step), metric, mode)
            self.save_content(content, int(step), keep=self.saves.keep)

    def save_content(self, content: Content, step: int, *, keep: int, suffix: str = ".pt") -> None:
        """Save content that a framework has gathered, like :meth:`save`."""
        self.speed.pause()
        self.saves.save(content, step, keep=keep, suffix=suffix)

    def checkpoint_saved(
        self, path: Path, step: int | None, position: Position | None = None
    ) -> None:
        """See :meth:`.run.Run.checkpoint_saved`."""
        step = self.reports.last_step if step is None else int(step)
        loss = self.losses.of_checkpoint(step)
        spent = 0.0
        if self.is_main:
            damage = self.saves.record(Path(path), step, loss, position)
            if damage:
                log.warning("checkpoint %s: %s; it is not used", path, damage)
                self.checkpoint_failed(damage)
                return
            spent = round(self.saving.clock.spent, 3)
        rotates = self.saving.rotates and loss != "unknown"
        event = CheckpointSaved(str(path), step, loss, rotates, spent)
        self.reports.send_last_progress()
        self.reports.send(event)
        self.speed.pause()
        self.hooks.pause("save")
        self.stops.answer_checkpoint({"answer": {"path": str(path), "step": step}})

    def checkpoint_failed(self, reason: str) -> None:
        """See :meth:`.run.Run.checkpoint_failed`."""
        self._owe(CheckpointError(reason))

    def _owe(self, error: CheckpointError) -> None:
        """Record and report a checkpoint that could not be saved."""
        if self.is_main:
            self.saving.failed(error)
            self.reports.send(CheckpointFailed(str(error)))
        self.stops.answer_checkpoint({"error": f"no checkpoint: {error}"})
