"""The built-in trainer: ``trainer=image_classification``.

The story of a run: open the data, build the model, resume from a checkpoint if there is one, train
and validate epoch by epoch, save, test.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from robust_train.errors import Interrupted, UserError
from robust_train.failures import classify_failure
from robust_train.microbatch.replicas import Replicated
from robust_train.microbatch.rng import seed_everything, seed_rank
from robust_train.run import MicroBatchPlan, Run
from robust_train.runfolder.cadence import SavePlan
from robust_train.runfolder.checkpoints import (
    CheckpointError,
    CheckpointFolder,
    read_newest,
    write_atomically,
)
from robust_train.values import MEMORY_FAILURES
from robust_train.vision.batches import (
    BatchPlan,
    Loading,
    StepSamples,
    in_order,
    read_in_parts,
    share_of,
)
from robust_train.vision.datasets import open_data
from robust_train.vision.evaluation import Score, evaluate
from robust_train.vision.images import ImageDataset
from robust_train.vision.models import (
    BuiltModel,
    build_model,
    count_parameters,
    enable_gradient_checkpointing,
    set_train_mode,
    trained_state,
)
from robust_train.vision.prepare import check_config, preload_modules
from robust_train.vision.reporting import Reporter, checked_loss
from robust_train.vision.schedule import CosineSchedule, make_optimizer
from robust_train.vision.splits import ImageSource
from robust_train.vision.step import Precision, accumulate_gradients, apply_gradients
from robust_train.vision.training_state import (
    REQUIRED,
    LossAverage,
    ResumePosition,
    TrainingState,
    identity_of,
)

log = logging.getLogger("robust_train.vision")

FINAL_NAME = "final.pt"

# a fork server looks for preload_modules beside the trainer
__all__ = ["preload_modules", "train"]


def train(cfg: DictConfig, run: Run) -> dict[str, Any]:
    """Train and test an image classifier.

    Returns:
        ``objective`` and ``test_accuracy`` (0 to 1), ``test_loss``, ``steps``, and ``checkpoint``,
        the path of the trained weights.

    Raises:
        ConfigError: the configuration, the data or the weights cannot be used.
        Interrupted: a stop was requested; a checkpoint was saved.
    """
    check_config(cfg)
    device = torch.device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    seed_everything(cfg.training.seed)
    run.memory_milestone("start")
    if run.world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with Reporter(
            run, log_every_steps=cfg.training.log_every_steps, epochs=cfg.training.epochs
        ) as reporter:
            training = Training(cfg, run, reporter, device)
            try:
                training.resume()
                training.fit()
                result = training.finish()
            finally:
                training.settle()
    except Exception as error:
        if classify_failure(error).kind in MEMORY_FAILURES:
            run.memory_milestone("out of memory")
        raise
    # not after a failure: it would wait for ranks that have gone
    if run.world_size > 1:
        dist.destroy_process_group()
    return result


class Training:
    """One attempt at the job, from the last checkpoint to the end."""

    def __init__(self, cfg: DictConfig, run: Run, reporter: Reporter, device: torch.device) -> None:
        self.cfg = cfg
        self.run = run
        self.reporter = reporter
        self.device = device
        run.micro_batch_plan = MicroBatchPlan.of(cfg)
        self.batcher = run.micro_batcher
        self.splits = open_data(cfg.dataset)
        built = build_model(cfg.model, self.splits.shape)
        self.images = built.images
        self.train_set = ImageDataset(
            self.splits.train, built.images, augment=cfg.dataset.augment, seed=cfg.training.seed
        )
        micro_batch = cfg.training.batch_size
        accumulation = cfg.training.gradient_accumulation_steps
        if run.batch_search is not None:
            micro_batch, accumulation = read_in_parts(micro_batch * accumulation)
        self.plan = BatchPlan(
            num_samples=len(self.train_set),
            micro_batch=micro_batch,
            accumulation_steps=accumulation,
            seed=cfg.training.seed,
            ranks=run.world_size,
            rank=run.rank,
        )
        self.loading = Loading(cfg.training.num_workers, cfg.training.prefetch_factor, device)
        self.schedule = CosineSchedule(
            cfg.training.lr,
            self.plan.num_samples * cfg.training.epochs,
            cfg.training.warmup_fraction,
        )
        self.state = self._prepare(built)
        self.model: nn.Module = self.state.model
        run.saving.plan = SavePlan.of(cfg)
        self.folder = CheckpointFolder(run, keep=cfg.training.keep_checkpoints)
        self.has_checkpoint = run.resume_checkpoint is not None
        self.score: Score | None = None

    def _prepare(self, built: BuiltModel) -> TrainingState:
        """Move the model to the device and create optimizer and number format."""
        cfg = self.cfg
        trained, total = count_parameters(built.module)
        log.info("model: %s, %d of %d parameters are trained", cfg.model.name, trained, total)
        log.info("Effective batch size: %d", self.plan.effective_batch)
        if cfg.training.gradient_checkpointing and not enable_gradient_checkpointing(built.module):
            log.warning("training.gradient_checkpointing: this model has none, it has no effect")
        model = built.module.to(self.device)
        self.run.memory_milestone(f"model moved to {self.device}")
        optimizer = make_optimizer(
            model.parameters(), lr=cfg.training.lr, weight_decay=cfg.training.weight_decay
        )
        self.run.memory_milestone("optimizer created")
        return TrainingState(
            model=model,
            optimizer=optimizer,
            precision=Precision(self.device, mixed=cfg.training.mixed_precision),
            device=self.device,
            identity=identity_of(
                cfg,
                train_samples=self.plan.num_samples,
                num_classes=self.splits.shape.num_classes,
            ),
            position=ResumePosition(),
            epoch_loss=LossAverage(),
            batcher=self.batcher,
        )

    def resume(self) -> None:
        """Resume from the last intact checkpoint, if there is one."""
        if self.run.is_main:
            self.folder.remove_leftovers()
        if self.run.resume_checkpoint is not None:
            found = read_newest(Path(self.run.resume_checkpoint), REQUIRED)
            if found is None:
                log.warning("no checkpoint is intact: training starts from the beginning")
            else:
                path, content = found
                self.state.restore(content, path)
                log.info("resumed from %s, step %d", path, self.state.position.step)
        if self.run.world_size > 1:
            # all ranks have read the checkpoint when this returns, and hold the same weights
            self.model = Replicated(self.state.model)
            seed_rank(self.cfg.training.seed, self.state.position.step, self.run.rank)
        self.reporter.begin(self.state.position, self._total_steps())

    def _total_steps(self) -> int:
        position, plan = self.state.position, self.plan
        if position.epoch >= self.cfg.training.epochs:
            return position.step
        whole_epochs: int = self.cfg.training.epochs - position.epoch - 1
        return position.step + plan.steps_left(position.samples) + whole_epochs * plan.steps_left(0)

    def fit(self) -> None:
        """Train the epochs that are left."""
        position = self.state.position
        while position.epoch < self.cfg.training.epochs:
            self.reporter.epoch_begins()
            self._train_epoch()
            # before validation, which may run out of memory for the first time
            is_last = position.epoch + 1 == self.cfg.training.epochs
            if is_last or not self.has_checkpoint:
                self._save()
            self.score = self._evaluate(self.splits.validation)
            train_loss = checked_loss(self.state.epoch_loss, position.step)
            self.reporter.epoch(position, train_loss, self.score)
            position.epoch, position.samples = position.epoch + 1, 0
            self.state.epoch_loss = LossAverage()

    def _train_epoch(self) -> None:
        """Train the epoch's steps from the current position on."""
        position, training = self.state.position, self.cfg.training
        set_train_mode(self.state.model)
        steps = list(self.plan.steps(position.epoch, position.samples))
        chunks = list(itertools.chain.from_iterable(steps))
        batches = self.loading.batches(self.train_set, chunks, position.epoch)
        for micro_batches in steps:
            self._stop_if_requested()
            step = StepSamples(batches, [len(chunk) for chunk in micro_batches])
            samples = self.plan.samples_in_step(position.samples)
            seen = position.epoch * self.plan.num_samples + position.samples
            lr = self.schedule.apply(self.state.optimizer, seen, samples)
            loss = self._gradients_of(step)
            is_step = apply_gradients(
                self.state.model,
                self.state.optimizer,
                precision=self.state.precision,
                max_grad_norm=training.max_grad_norm,
            )
            position.samples += samples
            if is_step:
                position.step += 1
                self.state.epoch_loss.add(loss, samples)
                self.reporter.step(position, loss, samples, lr)
            if self.run.checkpoint_due:
                self._save(in_background=True)
            self._write(self.folder.report_written)
        # validation may last
        self.settle()

    def _gradients_of(self, step: StepSamples) -> Tensor:
        """Accumulate the gradients of one optimizer step and return its mean loss."""
        parts = self.batcher.micro_batches(step, self.model, length=len, split=StepSamples.part)
        try:
            return accumulate_gradients(
                self.model,
                parts,
                device=self.device,
                precision=self.state.precision,
                label_smoothing=self.cfg.training.label_smoothing,
            )
        except Exception as error:
            if classify_failure(error).kind in MEMORY_FAILURES:
                # the step is undone, so the next attempt repeats nothing before it; a failure to
                # save must not hide this one
                with contextlib.suppress(Exception):
                    self._save()
            raise

    def _evaluate(self, source: ImageSource) -> Score:
        dataset = ImageDataset(source, self.images)
        run, size = self.run, self.plan.micro_batch
        chunks = in_order(share_of(range(len(dataset)), run.rank, run.world_size), size)
        most = len(share_of(range(len(dataset)), 0, run.world_size))
        score = evaluate(
            self.state.model,
            self.loading.batches(dataset, chunks, epoch=0),
            self.batcher,
            precision=self.state.precision,
            device=self.device,
            should_stop=lambda: run.stop_requested,
            rounds=len(in_order(range(most), size)),
        )
        if score is None:
            self._stop_if_requested()
        assert score is not None
        return score

    def _stop_if_requested(self) -> None:
        if self.run.stop_requested:
            self._save()
            raise Interrupted(f"stopped after step {self.state.position.step}")

    def _save(self, *, in_background: bool = False) -> None:
        """Save a checkpoint."""
        position = self.state.position
        checked_loss(self.state.epoch_loss, position.step)
        self.has_checkpoint = True
        if not self.run.is_main:
            return
        save = self.folder.save_from_copy if in_background else self.folder.save
        self._write(lambda: save(self.state.content(), position.step))

    def settle(self) -> None:
        """Wait for a checkpoint that is written in the background."""
        self._write(lambda: self.folder.report_written(wait=True))

    def _write(self, write: Callable[[], object]) -> None:
        """Write a checkpoint; if that fails, train on."""
        try:
            write()
        except CheckpointError as error:
            log.warning("checkpoint: %s; training goes on, earlier ones are kept", error)
            self.run.checkpoint_failed(str(error))

    def finish(self) -> dict[str, Any]:
        """Test, save the trained weights and return the result."""
        splits, position = self.splits, self.state.position
        if self.score is None or splits.test is not splits.validation:
            self.score = self._evaluate(splits.test)
        path = self.run.checkpoint_dir / FINAL_NAME
        weights = {
            "model": trained_state(self.state.model),
            "config": OmegaConf.to_container(self.cfg, resolve=True),
            "num_classes": splits.shape.num_classes,
            "test_accuracy": self.score.accuracy,
        }
        log.info("Test accuracy: %.2f %%", 100 * self.score.accuracy)
        try:
            if self.run.is_main:
                write_atomically(weights, path)
        except CheckpointError as error:
            raise UserError(
                f"{error}; training is complete, its weights are not saved: make room and repeat "
                f"the command with hydra.run.dir={self.run.run_dir}"
            ) from error
        log.info("trained weights: %s", path)
        return {
            "objective": self.score.accuracy,
            "test_accuracy": self.score.accuracy,
            "test_loss": self.score.loss,
            "steps": position.step,
            "checkpoint": str(path),
        }
