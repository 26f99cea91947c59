"""The story of the built-in trainer, ``trainer=image_classification``.

The attempt's runner calls `train` in the process of each rank. It opens the data, builds the model,
resumes from a checkpoint if there is one, trains and validates epoch by epoch, saves, and tests.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from robust_train.attempt.last_save import save_result
from robust_train.attempt.read_checkpoint import read_newest
from robust_train.attempt.run import Run, live_of
from robust_train.failures import classify_failure
from robust_train.folder.best import BEST_NAME, Best, record_best
from robust_train.folder.checkpoint_writing import CheckpointError, write_atomically
from robust_train.model.errors import ConfigError, RankFailure, TrainingStopped
from robust_train.step.ranks import of_all_ranks
from robust_train.step.replicas import Replicated
from robust_train.step.rng import capture_rng, restore_rng, seed_everything, seed_rank
from robust_train.step.splitting import share_of
from robust_train.vision import models, sharding
from robust_train.vision.datasets import Images, open_data
from robust_train.vision.identity import build_identity, check_identity
from robust_train.vision.images import (
    Batch,
    BatchPlan,
    ImageDataset,
    choose_read_size,
    join_batches,
    read_batches,
    split_into_chunks,
)
from robust_train.vision.keys import check_config, preload_modules
from robust_train.vision.reporting import Reporter
from robust_train.vision.step import (
    CosineSchedule,
    EpochPosition,
    LossAverage,
    Precision,
    Score,
    loss_of,
    make_optimizer,
    to_device,
    with_kernels_of,
)

log = logging.getLogger("robust_train.vision")

FINAL_NAME = "final.pt"
FORMAT = 2
REQUIRED = frozenset({"format", "identity", "position", "model", "optimizer", "rng", "epoch_loss"})
"""The keys without which a file is not a checkpoint of this trainer."""

# The launcher looks for `preload_modules` in the trainer's module, and imports the modules early.
__all__ = ["preload_modules", "train"]


def train(cfg: DictConfig, run: Run) -> dict[str, float | str]:
    """Train and test an image classifier.

    Returns:
        ``objective``, which is ``validation_accuracy``, and ``test_accuracy`` (0 to 1),
        ``test_loss``, ``steps``, and ``checkpoint``, the path of the trained weights.

    Raises:
        ConfigError: the configuration, the data or the weights cannot be used.
        TrainingStopped: a stop was requested, and a checkpoint was saved.
    """
    check_config(cfg)
    device = torch.device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    seed_everything(cfg.seed)
    live_of(run).reports.record_memory("start")
    if run.world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with Reporter(run, cfg) as reporter:
        training = Training(cfg, run, reporter, device)
        training.resume()
        training.fit()
        result = training.finish()
    # After a failure, this would wait for ranks that have ended, so it is not in a `finally`.
    if run.world_size > 1:
        dist.destroy_process_group()
    return result


class Training:
    """An attempt, from the last checkpoint to the end of training."""

    def __init__(self, cfg: DictConfig, run: Run, reporter: Reporter, device: torch.device) -> None:
        self.cfg = cfg
        self.run = run
        self.reporter = reporter
        self.device = device
        training = cfg.training
        self.splits = open_data(cfg.dataset)
        module, self.images = models.build_model(cfg.model, self.splits.shape)
        self.train_set = ImageDataset(
            self.splits.train, self.images, augment=cfg.dataset.augment, seed=cfg.seed
        )
        self.plan = self._create_plan()
        self.schedule = CosineSchedule(
            training.lr, self.plan.num_samples * training.epochs, training.warmup_fraction
        )
        self.precision = Precision(device, mixed=training.mixed_precision)
        self.is_sharded = run.world_size > 1 and training.sharding == "fsdp"
        self.net = self._move_to_device(module)
        self.model = self.net  # `resume` wraps it if there are several ranks.
        # With a scaler, the step is only counted once an overflow is known, and a fused optimizer
        # decides about the update later.
        has_scaler = self.precision.scaler.is_enabled()
        is_fused = device.type == "cuda" and not self.is_sharded and not has_scaler
        self.optimizer = make_optimizer(
            self.net.parameters(),
            lr=training.lr,
            weight_decay=training.weight_decay,
            fused=is_fused,
        )
        live_of(run).reports.record_memory("optimizer created")
        self.position = EpochPosition()
        self.epoch_loss = LossAverage()
        saves = live_of(run).saves
        saves.pass_over_skipped()
        if self.is_sharded:
            write_folder = sharding.create_folder_writer()
            self.folder = saves.folder(
                training.keep_checkpoints, write_folder=write_folder, copies=run.world_size
            )
        else:
            self.folder = saves.folder(training.keep_checkpoints)
        self.has_checkpoint = run.resume_checkpoint is not None
        self.score: Score | None = None  # of the last validation
        self.best: Best | None = None  # the best epoch so far

    def _create_plan(self) -> BatchPlan:
        """Return the plan of the optimizer steps. Warn if an epoch is smaller than a step."""
        run = self.run
        training = self.cfg.training
        effective = training.batch_size * training.gradient_accumulation_steps * run.world_size
        at_once = training.batch_size
        if live_of(run).parts.search is not None:
            # The first step searches for the micro-batch size.
            at_once = choose_read_size(effective)
        plan = BatchPlan(
            num_samples=len(self.train_set),
            effective_batch=effective,
            at_once=at_once,
            seed=self.cfg.seed,
            ranks=run.world_size,
            rank=run.rank,
        )
        if plan.effective_batch > plan.num_samples and run.is_main:
            log.warning(
                "the effective batch size %d is more than the %d training images: an epoch is one "
                "step with all of them",
                plan.effective_batch,
                plan.num_samples,
            )
        return plan

    def _move_to_device(self, module: nn.Module) -> nn.Module:
        """Move the model to the device, with gradient checkpointing and shards if configured."""
        training = self.cfg.training
        log.info(
            "model: %s, %d of %d parameters are trained",
            self.cfg.model.name,
            sum(p.numel() for p in module.parameters() if p.requires_grad),
            sum(p.numel() for p in module.parameters()),
        )
        if training.gradient_checkpointing and not models.enable_gradient_checkpointing(module):
            log.warning(
                "training.gradient_checkpointing: has no effect, this model does not support it"
            )
        module = module.to(self.device)
        if self.is_sharded:
            if self.precision.scaler.is_enabled():
                raise ConfigError(
                    "training.sharding=fsdp: this GPU has no bfloat16, and float16 does not work "
                    "with a sharded model; set training.mixed_precision=false"
                )
            sharding.shard(module)
        live_of(self.run).reports.record_memory(f"model moved to {self.device}")
        return module

    def resume(self) -> None:
        """Resume from the newest intact checkpoint if there is one, and report the start."""
        run = self.run
        if run.is_main:
            self.folder.remove_leftovers(run.resume_checkpoint)
        if run.resume_checkpoint is not None:
            load_shard = None
            if self.is_sharded:
                load_shard = sharding.create_shard_loader(self.net, self.optimizer)
            checkpoint = read_newest(
                run.resume_checkpoint, REQUIRED, share=load_shard, gather=of_all_ranks
            )
            if checkpoint is not None:
                path, content = checkpoint
                self._restore(content, path)
                log.info("resumed from %s, step %d", path, self.position.step)
                self._skip_to(live_of(run).saves.skips_to)
        if run.world_size > 1:
            if not self.is_sharded:
                # This waits until all ranks have read the checkpoint, and gives them the same
                # weights.
                self.model = Replicated(self.net)
            seed_rank(self.cfg.seed, self.position.step, run.rank)
        self.reporter.report_start(self.position, self._total_steps())

    def _skip_to(self, step: int) -> None:
        """Skip the data of this epoch up to ``step``, because training diverged on it."""
        position = self.position
        steps = max(step - self.position.step, 0)
        for _ in range(min(steps, self.plan.steps_left(position.samples))):
            position.samples += self.plan.samples_in_step(position.samples)

    def _total_steps(self) -> int:
        """Return the number of optimizer steps at the end of training."""
        position = self.position
        plan = self.plan
        epochs_left: int = self.cfg.training.epochs - position.epoch
        if epochs_left <= 0:
            return position.step
        later_epochs = (epochs_left - 1) * plan.steps_left(0)
        return position.step + plan.steps_left(position.samples) + later_epochs

    def fit(self) -> None:
        """Train the epochs that are left."""
        position = self.position
        epochs = self.cfg.training.epochs
        while position.epoch < epochs:
            self.reporter.start_epoch()
            self._train_epoch()
            # Save before validation, which may run out of memory for the first time.
            if position.epoch + 1 == epochs or not self.has_checkpoint:
                self._save()
            self.score = self._evaluate(self.splits.validation)
            train_loss = self.epoch_loss.value()
            self.reporter.report_epoch(position, train_loss, self.score)
            self._keep_if_best(self.score)
            position.epoch += 1
            position.samples = 0
            self.epoch_loss = LossAverage()

    def _keep_if_best(self, score: Score) -> None:
        """Save the weights as the best if this epoch is the best so far. All ranks call it."""
        best = Best(score.accuracy, self.position.step, "validation_accuracy")
        if not best.is_better_than(self.best):
            return
        self.best = best
        folder = self.run.checkpoint_dir
        weights = self._weights(validation_accuracy=score.accuracy)
        if self.run.is_main:
            try:
                write_atomically(weights, folder / BEST_NAME)
                record_best(folder, best)
            except (CheckpointError, OSError) as error:
                log.warning("%s; training continues without these weights as the best", error)

    def _train_epoch(self) -> None:
        """Train the steps of the epoch that are left."""
        run = self.run
        position = self.position
        models.set_train_mode(self.net)
        steps = list(self.plan.steps(position.epoch, position.samples))
        # A rank without samples in a step takes part with a sample that has no weight.
        reads = [chunks or [[0]] for chunks in steps]
        all_chunks = list(itertools.chain.from_iterable(reads))
        batches = self._read_batches(self.train_set, all_chunks, position.epoch)
        batches = live_of(run).speed.measure_waits(batches)
        # With a fused optimizer, `run.step` returns whether the previous step made an update.
        decides_late = all(group.get("fused") for group in self.optimizer.param_groups)
        if run.should_stop():
            self._save_and_stop()
        for chunks, read in zip(steps, reads, strict=True):
            samples = self.plan.samples_in_step(position.samples)
            seen = position.epoch * self.plan.num_samples + position.samples
            lr = self.schedule.rate(seen, samples)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batch = join_batches(list(itertools.islice(batches, len(read))))
            samples_of_rank = sum(len(chunk) for chunk in chunks)
            loss = self._accumulate_gradients(batch, samples_of_rank)
            is_step = run.step(
                self.optimizer, self.precision.scaler, self.cfg.training.max_grad_norm
            )
            position.samples += samples
            if is_step:
                position.step += 1
            if is_step or decides_late:
                leaves_out = live_of(run).losses.leaves_out
                self.epoch_loss.add(loss, samples, finite=leaves_out)
                self.reporter.report_step(position, loss, samples, lr, finite=leaves_out)
            # If a stop is requested, it saves the checkpoint, so a due checkpoint is not saved too.
            if run.should_stop():
                self._save_and_stop()
            if run.should_save():
                self._save(in_background=True)
        # Validation may take long, and the launcher should know about the checkpoint before.
        live_of(run).saves.finish()

    def _read_batches(
        self, dataset: ImageDataset, chunks: Sequence[Sequence[int]], epoch: int
    ) -> Iterator[Batch]:
        """Yield a batch for each chunk. For a GPU, batches are in pinned memory."""
        return read_batches(
            dataset, chunks, epoch, self.cfg.training, pinned=self.device.type == "cuda"
        )

    def _accumulate_gradients(self, batch: Batch, samples: int) -> Tensor:
        """Accumulate the gradients of an optimizer step, and return its mean loss.

        ``samples`` is the number of samples of the batch that count, 0 if its only sample has no
        weight.
        """
        scaler = self.precision.scaler

        def loss_of_part(batch: Batch) -> Tensor:
            return loss_of(
                self.model,
                batch,
                device=self.device,
                precision=self.precision,
                label_smoothing=self.cfg.training.label_smoothing,
            )

        def count_samples(batch: Batch) -> int:
            return samples

        def run_backward(loss: Tensor) -> None:
            torch.autograd.backward(scaler.scale(loss))

        try:
            loss: Tensor = self.run.backward(
                loss_of_part, batch, self.model, length=count_samples, backward=run_backward
            )
            return loss
        except Exception as error:
            # A sharded model can only be saved if all ranks are here, as with a RankFailure.
            can_save = not self.is_sharded or isinstance(error, RankFailure)
            if can_save and classify_failure(error).kind.is_memory:
                # The step is undone, so a checkpoint saves the next attempt from repeating earlier
                # steps. An error of saving must not hide this error.
                with contextlib.suppress(Exception):
                    self._save()
            raise

    @torch.no_grad()
    def _evaluate(self, source: Images) -> Score:
        """Return the model's score on ``source``. Stop if requested.

        Each rank scores its share of the images, and all ranks return the total. The model runs
        without its wrapper, in which the ranks would wait for each other.
        """
        run = self.run
        size = self.plan.at_once
        dataset = ImageDataset(source, self.images)
        samples = range(len(dataset))
        own_chunks = split_into_chunks(share_of(samples, run.rank, run.world_size), size)
        # Rank 0 has the largest share. The other ranks join each of its passes, if need be with a
        # sample that does not count.
        passes = len(split_into_chunks(share_of(samples, 0, run.world_size), size))
        padding: list[Sequence[int]] = [[0]] * (passes - len(own_chunks))
        chunks = own_chunks + padding
        if self.is_sharded:
            sharding.share_buffers(self.net)

        def score(part: Batch) -> Tensor:
            images_BCHW, labels_B = to_device(part, self.device)
            with self.precision.autocast():
                logits_BK = self.net(images_BCHW).float()
            loss = cross_entropy(logits_BK, labels_B, reduction="sum")
            hits = (logits_BK.argmax(dim=1) == labels_B).sum()
            count = loss.new_tensor(len(labels_B))
            return torch.stack([loss.double(), hits.double(), count.double()])

        self.net.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(self._read_batches(dataset, chunks, 0)):
            scores = run.forward(score, batch, self.net)
            if number < len(own_chunks):
                sums += torch.stack(scores).sum(dim=0)
            if run.should_stop():
                self._save_and_stop()
        if run.world_size > 1:
            dist.all_reduce(sums)
        loss, hits, count = sums.tolist()
        return Score(hits / count, loss / count)

    def _save_and_stop(self) -> NoReturn:
        """Save a checkpoint and end the attempt, because a stop was requested."""
        self._save()
        raise TrainingStopped(f"stopped after step {self.position.step}")

    def _save(self, *, in_background: bool = False) -> None:
        """Save a checkpoint. In the background, training continues while a copy is written."""
        step = self.position.step
        self.has_checkpoint = True
        live_of(self.run).saves.finish()
        if not self.run.is_main and not self.is_sharded:
            return

        def write() -> None:
            if in_background:
                self.folder.save_from_copy(self._content(), step)
            else:
                self.folder.save(self._content(), step)

        live_of(self.run).saves.try_to_write(write)

    def _content(self) -> dict[str, object]:
        """Return the content of a checkpoint. A run that resumes from it trains the same.

        Tensors are those of the run, not copies.
        """
        return {
            "format": FORMAT,
            "identity": self._identity(),
            "position": asdict(self.position),
            "model": models.trained_state(self.net),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "rng": capture_rng(self.device),
            "epoch_loss": list(self.epoch_loss.state()),
            "micro_batch": self.run.micro_batcher.state(),
            "device": self._kind_of_device(),
            "best": None if self.best is None else asdict(self.best),
        }

    def _restore(self, content: Mapping[str, Any], path: Path) -> None:
        """Restore the content of the checkpoint at ``path``.

        Raises:
            ConfigError: the checkpoint belongs to another run.
        """
        if content["format"] != FORMAT:
            raise ConfigError(
                f"checkpoint {path}: has format {content['format']}, this version reads {FORMAT}"
            )
        check_identity(content["identity"], self._identity(), path)
        try:
            models.load_trained_state(self.net, content["model"])
            self.optimizer.load_state_dict(with_kernels_of(content["optimizer"], self.optimizer))
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"checkpoint {path}: {reason}") from error
        # The saved scaler is empty if the checkpoint was written without scaling, such as on the
        # CPU.
        if self.precision.scaler.is_enabled() and content["scaler"]:
            self.precision.scaler.load_state_dict(content["scaler"])
        restore_rng(content["rng"], self.device)
        self.position = EpochPosition(**content["position"])
        if content.get("best") is not None:
            self.best = Best(**content["best"])
        total, samples = content["epoch_loss"]
        self.epoch_loss = LossAverage(total, samples)
        # A micro-batch size that fits one kind of device may not fit another.
        if content.get("device") == self._kind_of_device():
            self.run.micro_batcher.restore(content["micro_batch"])

    def _kind_of_device(self) -> str:
        """Return the GPU's model, or ``cpu``."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type

    def _identity(self) -> dict[str, str]:
        """Return the values that a checkpoint must share with this run."""
        return build_identity(
            self.cfg, samples=self.plan.num_samples, classes=self.splits.shape.num_classes
        )

    def _weights(self, **scores: float) -> dict[str, Any]:
        """Return the content of a file with the trained weights. All ranks call it."""
        weights: Any = models.trained_state(self.net)
        if self.is_sharded:
            weights = sharding.gather_weights(weights, keeps=self.run.is_main)
        return {
            "model": weights,
            "config": OmegaConf.to_container(self.cfg, resolve=True),
            "num_classes": self.splits.shape.num_classes,
            **scores,
        }

    def finish(self) -> dict[str, float | str]:
        """Test, save the trained weights and return the result."""
        run = self.run
        validation = self.score
        if validation is None:
            # A run that resumes after its last epoch has not validated in this attempt.
            validation = self._evaluate(self.splits.validation)
        test = self._evaluate(self.splits.test)
        path = run.checkpoint_dir / FINAL_NAME
        content = self._weights(test_accuracy=test.accuracy)
        log.info("Test accuracy: %.2f %%", 100 * test.accuracy)
        if run.is_main:
            save_result(live_of(run), lambda: write_atomically(content, path))
        log.info("trained weights: %s", path)
        return {
            "objective": validation.accuracy,
            "validation_accuracy": validation.accuracy,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "steps": self.position.step,
            "checkpoint": str(path),
        }
