"""A loop of one's own with accelerate under the launcher: :class:`RobustLoop`.

::

    def train(cfg, run):
        accelerator = Accelerator(cpu=cfg.device == "cpu")
        loader = DataLoader(data, effective_batch_size(cfg), shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        loop = RobustLoop(accelerator, model, loader, cfg=cfg, run=run)
        for epoch in loop.epochs(cfg.training.epochs):
            for batch in loop.batches():
                for micro in loop.micro_batches(batch):
                    with micro:
                        x, y = micro.data
                        loss = criterion(model(x), y)
                        micro.backward(loss, scaler=accelerator.scaler)
                optimizer.step()
                optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.extras import require
from robust_train.errors import Interrupted, UserError
from robust_train.integrations.one_process import refuse_ranks
from robust_train.integrations.sample_order import take_over
from robust_train.microbatch.batcher import MicroBatches
from robust_train.run import Run
from robust_train.runfolder.cadence import SavePlan

require("accelerate", "robust_train.integrations.accelerate", extra="accelerate")

log = logging.getLogger("robust_train.vision")

__all__ = ["RobustLoop", "effective_batch_size"]

_SAVED = "step-"


def effective_batch_size(cfg: DictConfig) -> int:
    """Samples in an optimizer step: what the loader's batches have, however they are split."""
    return int(cfg.training.batch_size * cfg.training.gradient_accumulation_steps)


class RobustLoop:
    """Epochs and batches of a job, over all of its attempts.

    A batch is an optimizer step. Where memory runs out in it, only that step is repeated, with
    smaller parts; where that is not enough the next attempt goes on from the last checkpoint,
    which holds all that ``Accelerator.save_state`` saves and the place in the data.

    Args:
        accelerator: of one process, without an accumulation of its own.
        model: what gets gradients, as ``accelerator.prepare`` gave it.
        loader: of training samples, in batches of :func:`effective_batch_size`.
        cfg: the config that the launcher gave to the trainer function.
        run: the run that it gave.

    Raises:
        UserError: the effective batch could not be kept with these; the message says why.
    """

    def __init__(
        self, accelerator: Any, model: Any, loader: Any, *, cfg: DictConfig, run: Run
    ) -> None:
        refuse_ranks(run, "accelerate")
        _check(accelerator)
        self.accelerator = accelerator
        self.model = model
        self.run = run
        self.epoch, self.samples, self.step = 0, 0, 0
        self._loader = loader
        self._effective = effective_batch_size(cfg)
        self._order = take_over(
            loader,
            name="loader",
            batch_size=self._effective,
            multiple=self._effective,
            seed=cfg.training.seed,
        )
        self._cfg = cfg.training
        run.saving.plan = SavePlan.of(cfg)
        self._saved_step: int | None = None
        self._total: int | None = None
        self._parts: MicroBatches | None = None
        self._loss: dict[str, float] = {}
        accelerator.register_for_checkpointing(self)
        if run.stop_requested:
            raise Interrupted("stopped before the first step")

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, from 0; the first one may have begun in an earlier attempt."""
        self._resume()
        self._total = count * -(-len(self._order) // self._effective)
        self.run.started(self.step)
        self.run.memory_milestone("training begins")
        while self.epoch < count:
            yield self.epoch
            self.epoch, self.samples = self.epoch + 1, 0
            if self.epoch < count and self._saved_step is None:
                self.save()

    def batches(self) -> Iterator[Any]:
        """The batches of the current epoch that are left; asking for the next one says that the
        step is done.

        Raises:
            Interrupted: the run was asked to stop; a checkpoint was saved.
        """
        self._order.begin(self.epoch, self.samples)
        if self.samples >= len(self._order):
            return
        for batch in self._loader:
            yield batch
            self.samples = min(self.samples + self._effective, len(self._order))
            self.step += 1
            self._step_done()

    def micro_batches(self, batch: Any, **options: Any) -> MicroBatches:
        """``run.micro_batches`` of this loop's model."""
        self._parts = self.run.micro_batches(batch, self.model, **options)
        return self._parts

    def save(self) -> Path | None:
        """Save a checkpoint, and remove those that are too many.

        Returns:
            Where it lies; None where it could not be written, which a warning tells.
        """
        folder = self.run.checkpoint_dir
        path = folder / f"{_SAVED}{self.step:08d}"
        unfinished = folder / f".{path.name}.tmp"
        if path.exists() and self._saved_step == self.step:
            return path
        for leftover in (unfinished, path):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            self.accelerator.save_state(str(unfinished))
            unfinished.rename(path)
        except OSError as error:
            log.warning("checkpoint: %s; training goes on, earlier ones are kept", error)
            self.run.checkpoint_failed(str(error))
            return None
        self._saved_step = self.step
        self.run.checkpoint_saved(path, self.step)
        self.run.saving.rotate(f"{_SAVED}*", self._cfg.keep_checkpoints)
        return path

    def state_dict(self) -> dict[str, Any]:
        """For ``Accelerator.save_state``."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "step": self.step,
            "micro_batch": self.run.micro_batcher.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """For ``Accelerator.load_state``."""
        self.epoch, self.samples = state["epoch"], state["samples"]
        self.step = self._saved_step = state["step"]
        self.run.micro_batcher.restore(state["micro_batch"])

    def _resume(self) -> None:
        if self.run.resume_checkpoint is None:
            return
        path = Path(self.run.resume_checkpoint)
        if not path.exists():
            left = sorted(self.run.checkpoint_dir.glob(f"{_SAVED}*"))
            log.warning(
                "the checkpoint %s is gone: training goes on from %s",
                path,
                left[-1] if left else "the beginning",
            )
            if not left:
                return
            path = left[-1]
        self.accelerator.load_state(str(path))

    def _step_done(self) -> None:
        is_first = self.run.last_step is None
        # reading it waits for the GPU
        if self._parts is not None and self.step % max(self._cfg.log_every_steps, 1) == 0:
            self._loss = {"loss": float(self._parts.loss)}
        self._parts = None
        if self.run.progress(self.step, total_steps=self._total, **self._loss):
            self._loss = {}
        if is_first:
            self.run.memory_milestone("first step done")
        if self.run.stop_requested:
            if self._saved_step != self.step:
                self.save()
            raise Interrupted(f"stopped after step {self.step}")
        if self.run.checkpoint_due:
            self.save()


def _check(accelerator: Any) -> None:
    if accelerator.num_processes != 1:
        raise UserError(
            f"Accelerator: has {accelerator.num_processes} processes; an attempt has one: start "
            "it with train_robust.py, not with accelerate launch"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            "Accelerator: has an accumulation of its own, which would divide the gradients once "
            "more; leave gradient_accumulation_steps out and set "
            "training.gradient_accumulation_steps"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UserError(
            "Accelerator: automatic_checkpoint_naming puts checkpoints where no later attempt "
            "finds them; leave it out"
        )
