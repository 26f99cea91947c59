"""What :func:`robust_train.integrations.lightning.fit` adds to a Lightning trainer."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from robust_train.config.extras import require
from robust_train.errors import UserError
from robust_train.failures import classify_failure
from robust_train.integrations.lightning_place import Place, loops_at, share_of_step
from robust_train.integrations.sample_order import SampleOrder, take_over
from robust_train.microbatch.rng import capture_rng, restore_rng
from robust_train.run import Run
from robust_train.runfolder.cadence import SavePlan
from robust_train.values import MEMORY_FAILURES

log = logging.getLogger("robust_train.vision")

_NEEDED_BY = "robust_train.integrations.lightning"
_Checkpoint: Any = require("lightning.pytorch.callbacks", _NEEDED_BY, extra="lightning").Checkpoint
_io = require("lightning.pytorch.plugins.io", _NEEDED_BY, extra="lightning")
_CheckpointIO: Any = _io.CheckpointIO


class Stopped(Exception):
    """Leaves ``trainer.fit`` at once; Lightning would turn a KeyboardInterrupt into an exit."""


class RobustCallback(_Checkpoint):  # type: ignore[misc]
    """What :func:`fit` adds to a trainer: place, checkpoints, journal, and stopping.

    It is a ``Checkpoint``, so Lightning calls it after the user's own callbacks.

    Args:
        cfg: the config that the launcher gave to the trainer function.
        run: the run that it gave.
    """

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        self.run = run
        self.micro_batch: int = cfg.training.batch_size
        self.accumulation: int = cfg.training.gradient_accumulation_steps
        self.seed = cfg.training.seed
        self.place = Place()
        self._order: SampleOrder | None = None
        self._cfg = cfg.training
        run.saving.plan = SavePlan.of(cfg)
        self._restored: Mapping[str, Any] | None = None
        self._saved_step: int | None = None
        self._batches = 0  # of this epoch, behind
        self._seen = 0  # samples of this epoch, those of the step in progress included
        self._group = self.accumulation  # micro-batches in the step in progress
        self._sigterm: Any = signal.SIG_DFL
        self._loss: dict[str, float] = {}

    def own_loader(self, loader: Any, name: str) -> Any:
        """Have the training samples come in an order that a resumed run can go on with."""
        self._order = take_over(
            loader,
            name=name,
            batch_size=self.micro_batch,
            multiple=self.micro_batch * self.accumulation,
            seed=self.seed,
        )
        self.place = replace(self.place, epoch_samples=len(self._order))
        self._find_place()
        return loader

    def _find_place(self) -> None:
        if self._order is None:
            return
        if self.place.samples >= self.place.epoch_samples:
            self._order.begin(self.place.epoch + 1)
        else:
            self._order.begin(self.place.epoch, self.place.samples)

    # what is in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Lightning saves it with everything else."""
        return {"place": asdict(self.place), "rng": capture_rng(self._device)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before Lightning reads its loops: have them go on in this attempt's micro-batches."""
        restored = checkpoint["callbacks"].get(self.state_key)
        if restored is None:
            raise UserError(
                f"checkpoint {trainer.ckpt_path}: was not written under robust_train; start in "
                "another run folder, or load its weights in the model"
            )
        self._restored = restored
        self.place = Place(**restored["place"])
        loops = checkpoint["loops"]
        loops["fit_loop"] = loops_at(loops["fit_loop"], self.place, self.micro_batch)
        self._find_place()

    # the story of a fit

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Hear of every checkpoint, whoever has it written."""
        if stage != "fit":
            return
        self._device = trainer.strategy.root_device
        trainer.strategy.checkpoint_io = _AnnouncingIO(trainer.strategy.checkpoint_io, self)
        self._sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Random numbers go on as well."""
        if self._sigterm not in (signal.SIG_DFL, None) and _is_main_thread():
            # Lightning's own, which it has put before the launcher's, ends the run within a step
            signal.signal(signal.SIGTERM, self._sigterm)
        if self._restored is not None:
            restore_rng(self._restored["rng"], self._device)
            self._restored = None
        is_between = self.place.samples in (0, self.place.epoch_samples)
        self._seen = 0 if is_between else self.place.samples
        self._batches = 0 if is_between else self.place.batches_behind(self.micro_batch)
        self._begin_group()
        self.run.started(trainer.global_step)
        self.run.memory_milestone("fit begins")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Not called where an epoch is resumed in the middle."""
        self.place = replace(self.place, epoch=trainer.current_epoch, samples=0)
        self._seen = self._batches = 0
        self._begin_group()
        if self._order is not None:
            # with reloaded data there has been one pass more than epochs
            self._order.begin(trainer.current_epoch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Have every sample of a step count the same, also where the step is short."""
        share = share_of_step(
            self._next_samples(),
            group=self._group,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            left=self.place.epoch_samples - self.place.samples,
        )
        if share != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * share)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: count it, save if it is time, stop if asked to."""
        self._seen += self._next_samples()
        self._batches += 1
        if trainer.global_step == self.place.step:
            return
        is_first = self.run.last_step is None
        self.place = replace(self.place, samples=self._seen, step=trainer.global_step)
        self._begin_group()
        self._tell(trainer, outputs)
        if is_first:
            self.run.memory_milestone("first step done")
        self._stop_if_asked(trainer)
        # at the end of an epoch once validation has logged its figures
        if self._seen < self.place.epoch_samples and self.run.checkpoint_due:
            self.save(trainer)

    def on_validation_batch_end(self, trainer: Any, *arguments: Any) -> None:
        """Validation may last; what it has computed so far is not kept."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The figures go into the journal."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.run.record("validation", {"step": trainer.global_step, **logged(trainer)})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, unless another callback of the trainer has just done it."""
        step = trainer.global_step
        if self._saved_step == step:
            return
        is_last = step == trainer.estimated_stepping_batches
        if is_last or self._saved_step is None or self.run.checkpoint_due:
            self.save(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Say how much memory was in use when it ran out."""
        if isinstance(exception, Exception) and classify_failure(exception).kind in MEMORY_FAILURES:
            self.run.memory_milestone("out of memory")

    def save(self, trainer: Any) -> None:
        """Save a checkpoint into the run folder, and remove those that are too many."""
        folder = self.run.checkpoint_dir
        try:
            trainer.save_checkpoint(folder / f"step-{self.place.step:08d}.ckpt")
        except OSError as error:
            log.warning("checkpoint: %s; training goes on, earlier ones are kept", error)
            self.run.checkpoint_failed(str(error))
            return
        self.run.saving.rotate("step-*.ckpt", self._cfg.keep_checkpoints)

    def written(self, path: Path, step: int) -> None:
        """A complete checkpoint lies at ``path``."""
        self._saved_step = step
        self.run.checkpoint_saved(path, step)

    def _begin_group(self) -> None:
        self._group = self.accumulation - self._batches % self.accumulation

    def _next_samples(self) -> int:
        return min(self.micro_batch, self.place.epoch_samples - self._seen)

    def _tell(self, trainer: Any, outputs: Any) -> None:
        step = self.place.step
        total = trainer.estimated_stepping_batches
        # reading it waits for the GPU
        if step % max(self._cfg.log_every_steps, 1) == 0 and isinstance(outputs, Mapping):
            # Lightning has divided it
            self._loss = {"loss": float(outputs["loss"]) * self.accumulation}
        total_steps = None if total == float("inf") else total
        if self.run.progress(step, total_steps=total_steps, **self._loss):
            self._loss = {}

    def _stop_if_asked(self, trainer: Any) -> None:
        if not self.run.stop_requested:
            return
        if self._saved_step != self.place.step:
            self.save(trainer)
        raise Stopped(f"stopped after step {self.place.step}")


class _AnnouncingIO(_CheckpointIO):  # type: ignore[misc]
    """Writes checkpoints as another one does, and tells of those that can be resumed from."""

    def __init__(self, inner: Any, callback: RobustCallback) -> None:
        if isinstance(inner, _io.AsyncCheckpointIO):
            raise UserError(
                "AsyncCheckpointIO: nobody can tell when a checkpoint is complete; leave it out"
            )
        self._inner = inner
        self._callback = callback

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self._inner.save_checkpoint(checkpoint, path, storage_options)
        # weights alone are no place to go on from
        if "optimizer_states" in checkpoint and Path(path).exists():
            self._callback.written(Path(path).absolute(), checkpoint["global_step"])

    def load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        return self._inner.load_checkpoint(*arguments, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self._inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self._inner.teardown()


def logged(trainer: Any) -> dict[str, float]:
    """The latest figures that the model has logged."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
