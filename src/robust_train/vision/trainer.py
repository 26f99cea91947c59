"""The built-in trainer, ``trainer=image_classification``.

Open the data, build the model, resume from a checkpoint if there is one, train and validate epoch
by epoch, save, test.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from robust_train.attempt import checkpoints
from robust_train.attempt.run import Run
from robust_train.failures import classify_failure
from robust_train.folder.checkpoints import CheckpointError, write_atomically
from robust_train.model.errors import ConfigError, Interrupted, RankFailure, UserError
from robust_train.step.ranks import of_all_ranks
from robust_train.step.replicas import Replicated
from robust_train.step.rewind import seed_everything, seed_rank
from robust_train.step.splitting import share_of
from robust_train.vision import models
from robust_train.vision.batches import (
    Batch,
    BatchPlan,
    Loading,
    StepSamples,
    in_order,
    read_in_parts,
)
from robust_train.vision.datasets import open_data
from robust_train.vision.images import ImageDataset, ImageSource
from robust_train.vision.prepare import check_config, preload_modules
from robust_train.vision.reporting import Reporter, checked_loss
from robust_train.vision.sharding import folder_writer, shard, share_buffers, shares
from robust_train.vision.step import (
    CosineSchedule,
    Precision,
    Score,
    apply_gradients,
    evaluate,
    loss_of,
    make_optimizer,
)
from robust_train.vision.training_state import (
    REQUIRED,
    LossAverage,
    TrainingState,
    identity_of,
)

log = logging.getLogger("robust_train.vision")

FINAL_NAME = "final.pt"

# an interpreter that starts early looks for preload_modules beside the trainer
__all__ = ["preload_modules", "train"]


def train(cfg: DictConfig, run: Run) -> dict[str, float | str]:
    """Train and test an image classifier.

    Returns:
        ``objective``, which is ``validation_accuracy``, and ``test_accuracy`` (0 to 1),
        ``test_loss``, ``steps``, and ``checkpoint``, the path of the trained weights.

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
    run.record_memory("start")
    if run.world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with Reporter(run, cfg) as reporter:
        training = Training(cfg, run, reporter, device)
        try:
            training.resume()
            training.fit()
            result = training.finish()
        finally:
            training.wait_for_write()
    # not after a failure: it would wait for ranks that have gone
    if run.world_size > 1:
        dist.destroy_process_group()
    return result


class Training:
    """One attempt at the job, from the last checkpoint to the end."""

    def __init__(
        self, cfg: DictConfig, run: Run, reporter: Reporter, device: torch.device
    ) -> None:
        self.cfg = cfg
        self.run = run
        self.reporter = reporter
        self.device = device
        training = cfg.training
        self.splits = open_data(cfg.dataset)
        built = models.build_model(cfg.model, self.splits.shape)
        self.images = built.images
        self.train_set = ImageDataset(
            self.splits.train,
            built.images,
            augment=cfg.dataset.augment,
            seed=training.seed,
        )
        micro_batch, accumulation = (
            training.batch_size,
            training.gradient_accumulation_steps,
        )
        if run.batch_search is not None:
            micro_batch, accumulation = read_in_parts(micro_batch * accumulation)
        self.plan = BatchPlan(
            num_samples=len(self.train_set),
            micro_batch=micro_batch,
            accumulation_steps=accumulation,
            seed=training.seed,
            ranks=run.world_size,
            rank=run.rank,
        )
        self.loading = Loading(training.num_workers, training.prefetch_factor, device)
        total_samples = self.plan.num_samples * training.epochs
        self.schedule = CosineSchedule(
            training.lr, total_samples, training.warmup_fraction
        )
        self.state = self._prepare(built.module)
        self.model: nn.Module = self.state.model
        is_sharded, keep = self.state.is_sharded, training.keep_checkpoints
        self.folder = checkpoints.CheckpointFolder(
            run,
            keep=keep,
            write_folder=folder_writer() if is_sharded else None,
            copies=run.world_size if is_sharded else 1,
        )
        self.has_checkpoint = run.resume_checkpoint is not None
        self.score: Score | None = None  # of the last validation

    def _prepare(self, module: nn.Module) -> TrainingState:
        """Move the model to the device and create optimizer and number format."""
        cfg, run = self.cfg, self.run
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        total = sum(p.numel() for p in module.parameters())
        log.info(
            "model: %s, %d of %d parameters are trained", cfg.model.name, trained, total
        )
        effective, images = self.plan.effective_batch, self.plan.num_samples
        log.info("Effective batch size: %d", effective)
        if effective > images and run.is_main:
            log.warning(
                "the effective batch size %d is more than the %d training images: an epoch is one "
                "step with all of them",
                effective,
                images,
            )
        if (
            cfg.training.gradient_checkpointing
            and not models.enable_gradient_checkpointing(module)
        ):
            log.warning(
                "training.gradient_checkpointing: this model has none, it has no effect"
            )
        model = module.to(self.device)
        precision = Precision(self.device, mixed=cfg.training.mixed_precision)
        is_sharded = run.world_size > 1 and cfg.training.sharding == "fsdp"
        if is_sharded:
            if precision.scaler.is_enabled():
                raise ConfigError(
                    "training.sharding=fsdp: this GPU has no bfloat16, and float16 with a scaler "
                    "does not go with shards; write training.mixed_precision=false"
                )
            shard(model)
        run.record_memory(f"model moved to {self.device}")
        optimizer = make_optimizer(
            model.parameters(),
            lr=cfg.training.lr,
            weight_decay=cfg.training.weight_decay,
        )
        run.record_memory("optimizer created")
        return TrainingState(
            model=model,
            optimizer=optimizer,
            precision=precision,
            device=self.device,
            identity=identity_of(
                cfg, self.plan.num_samples, self.splits.shape.num_classes
            ),
            batcher=run.micro_batcher,
            is_sharded=is_sharded,
        )

    def resume(self) -> None:
        """Resume from the last intact checkpoint, if there is one."""
        run, state = self.run, self.state
        if run.is_main:
            self.folder.remove_leftovers()
        if run.resume_checkpoint is not None:
            share = shares(state.model, state.optimizer) if state.is_sharded else None
            found = checkpoints.read_newest(
                Path(run.resume_checkpoint), REQUIRED, share=share, gather=of_all_ranks
            )
            if found is None:
                log.warning(
                    "no checkpoint is intact: training starts from the beginning"
                )
            else:
                path, content = found
                state.restore(content, path)
                log.info("resumed from %s, step %d", path, state.position.step)
        if run.world_size > 1 and not state.is_sharded:
            # all ranks have read the checkpoint when this returns, and hold the same weights
            self.model = Replicated(state.model)
        if run.world_size > 1:
            seed_rank(self.cfg.training.seed, state.position.step, run.rank)
        self.reporter.begin(state.position, self._total_steps())

    def _total_steps(self) -> int:
        position, plan = self.state.position, self.plan
        epochs_left: int = self.cfg.training.epochs - position.epoch
        if epochs_left <= 0:
            return position.step
        later_epochs = (epochs_left - 1) * plan.steps_left(0)
        return position.step + plan.steps_left(position.samples) + later_epochs

    def fit(self) -> None:
        """Train the epochs that are left."""
        position, epochs = self.state.position, self.cfg.training.epochs
        while position.epoch < epochs:
            self.reporter.epoch_begins()
            self._train_epoch()
            # before validation, which may run out of memory for the first time
            if position.epoch + 1 == epochs or not self.has_checkpoint:
                self._save()
            self.score = self._evaluate(self.splits.validation)
            train_loss = checked_loss(self.state.epoch_loss, position.step)
            self.reporter.epoch(position, train_loss, self.score)
            position.epoch, position.samples = position.epoch + 1, 0
            self.state.epoch_loss = LossAverage()

    def _train_epoch(self) -> None:
        """Train the epoch's steps from the current position on."""
        state, position = self.state, self.state.position
        models.set_train_mode(state.model)
        steps = list(self.plan.steps(position.epoch, position.samples))
        # of a sharded model every rank has to run a part in each step, without weight if need be
        reads = [own or [[0]] for own in steps] if state.is_sharded else steps
        chunks = list(itertools.chain.from_iterable(reads))
        batches = self.run.batches(
            self.loading.batches(self.train_set, chunks, position.epoch)
        )
        for micro_batches in steps:
            self._stop_if_requested()
            step = StepSamples(batches, [len(chunk) for chunk in micro_batches])
            samples = self.plan.samples_in_step(position.samples)
            seen = position.epoch * self.plan.num_samples + position.samples
            lr = self.schedule.rate(seen, samples)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            loss = self._gradients_of(step)
            is_step = apply_gradients(
                state.model,
                state.optimizer,
                precision=state.precision,
                max_grad_norm=self.cfg.training.max_grad_norm,
            )
            position.samples += samples
            if is_step:
                position.step += 1
                state.epoch_loss.add(loss, samples)
                self.reporter.step(position, loss, samples, lr)
            if self.run.checkpoint_due:
                self._save(in_background=True)
            self._write(self.folder.report_written)
        # validation may last
        self.wait_for_write()

    def _gradients_of(self, step: StepSamples) -> Tensor:
        """Accumulate the gradients of one optimizer step and return its mean loss."""
        precision = self.state.precision

        def loss_of_part(batch: Batch) -> Tensor:
            return loss_of(
                self.model,
                batch,
                device=self.device,
                precision=precision,
                label_smoothing=self.cfg.training.label_smoothing,
            )

        try:
            return self.state.batcher.backward(
                loss_of_part,
                step,
                self.model,
                split=StepSamples.part,
                backward=lambda loss: torch.autograd.backward(
                    precision.scaler.scale(loss)
                ),
            )
        except Exception as error:
            # of a sharded model all ranks have to save
            can_save = not self.state.is_sharded or isinstance(error, RankFailure)
            if can_save and classify_failure(error).kind.is_memory:
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
        rounds, own = len(in_order(range(most), size)), len(chunks)
        if self.state.is_sharded:  # every pass needs all ranks
            chunks += [[0]] * (rounds - own)
            share_buffers(self.state.model)
        score = evaluate(
            self.state.model,
            self.loading.batches(dataset, chunks, epoch=0),
            self.state.batcher,
            precision=self.state.precision,
            device=self.device,
            should_stop=lambda: run.stop_requested,
            rounds=rounds,
            own=own,
        )
        if score is None:
            self._save_and_stop()
        return score

    def _stop_if_requested(self) -> None:
        if self.run.stop_requested:
            self._save_and_stop()

    def _save_and_stop(self) -> NoReturn:
        self._save()
        raise Interrupted(f"stopped after step {self.state.position.step}")

    def _save(self, *, in_background: bool = False) -> None:
        """Save a checkpoint."""
        step = self.state.position.step
        checked_loss(self.state.epoch_loss, step)
        self.has_checkpoint = True
        self.wait_for_write()
        if self.run.is_main or self.state.is_sharded:
            save = self.folder.save_from_copy if in_background else self.folder.save
            self._write(lambda: save(self.state.content(), step))

    def wait_for_write(self) -> None:
        """Wait for a checkpoint that is written in the background."""
        self._write(lambda: self.folder.report_written(wait=True))

    def _write(self, write: Callable[[], object]) -> None:
        """Write a checkpoint; if that fails, train on."""
        try:
            write()
        except CheckpointError as error:
            if self.run.is_main:
                log.warning(
                    "checkpoint: %s; training goes on, earlier ones are kept", error
                )
            self.run.checkpoint_failed(str(error))

    def finish(self) -> dict[str, float | str]:
        """Test, save the trained weights and return the result."""
        splits = self.splits
        validation = self.score or self._evaluate(splits.validation)
        test = self._evaluate(splits.test)
        accuracy, path = test.accuracy, self.run.checkpoint_dir / FINAL_NAME
        weights = {
            "model": self.state.weights(is_main=self.run.is_main),
            "config": OmegaConf.to_container(self.cfg, resolve=True),
            "num_classes": splits.shape.num_classes,
            "test_accuracy": accuracy,
        }
        log.info("Test accuracy: %.2f %%", 100 * accuracy)
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
            "objective": validation.accuracy,
            "validation_accuracy": validation.accuracy,
            "test_accuracy": accuracy,
            "test_loss": test.loss,
            "steps": self.state.position.step,
            "checkpoint": str(path),
        }
