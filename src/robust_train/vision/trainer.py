"""The built-in trainer, ``trainer=image_classification``.

The attempt's runner calls `train` in the process of each rank: open the data, build the model,
resume from a checkpoint if any, train and validate epoch by epoch, save, test.
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
from robust_train.folder.checkpoints import CheckpointError, write_atomically
from robust_train.model.errors import ConfigError, RankFailure, TrainingStopped
from robust_train.step.ranks import of_all_ranks
from robust_train.step.replicas import Replicated
from robust_train.step.rng import capture_rng, restore_rng, seed_everything, seed_rank
from robust_train.step.splitting import share_of
from robust_train.vision import models, sharding
from robust_train.vision.datasets import Images, open_data
from robust_train.vision.images import (
    Batch,
    BatchPlan,
    ImageDataset,
    in_order,
    joined,
    read_at_once,
    read_batches,
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
    with_own_kernels,
)

log = logging.getLogger("robust_train.vision")

FINAL_NAME = "final.pt"
FORMAT = 2
REQUIRED = frozenset({"format", "identity", "position", "model", "optimizer", "rng", "epoch_loss"})
"""The keys without which a file is not a checkpoint of this trainer."""

# these change how fast or how far a run goes, not the meaning of weights and sample order
_NOT_IDENTITY = frozenset(
    {
        "dataset.root",
        "dataset.download",
        "dataset.num_workers",
        "dataset.epochs",
        "model.lr",
        "model.dropout",
        "model.lora_dropout",
    }
)

# an interpreter that starts early looks for preload_modules beside the trainer
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
    # not after a failure: it would wait for ranks that have ended
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
        training = cfg.training
        self.splits = open_data(cfg.dataset)
        module, self.images = models.build_model(cfg.model, self.splits.shape)
        self.train_set = ImageDataset(
            self.splits.train, self.images, augment=cfg.dataset.augment, seed=cfg.seed
        )
        self.plan = self._plan()
        self.schedule = CosineSchedule(
            training.lr, self.plan.num_samples * training.epochs, training.warmup_fraction
        )
        self.precision = Precision(device, mixed=training.mixed_precision)
        self.is_sharded = run.world_size > 1 and training.sharding == "fsdp"
        self.net = self._on_device(module)
        self.model = self.net  # wrapped, if it has a wrapper
        self.optimizer = make_optimizer(
            self.net.parameters(),
            lr=training.lr,
            weight_decay=training.weight_decay,
            # a scaler must report an overflow before the step is counted
            fused=device.type == "cuda"
            and not self.is_sharded
            and not self.precision.scaler.is_enabled(),
        )
        live_of(run).reports.record_memory("optimizer created")
        self.position = EpochPosition()
        self.epoch_loss = LossAverage()
        live_of(run).saves.pass_over_skipped()
        self.folder = live_of(run).saves.folder(
            training.keep_checkpoints,
            write_folder=sharding.folder_writer() if self.is_sharded else None,
            copies=run.world_size if self.is_sharded else 1,
        )
        self.has_checkpoint = run.resume_checkpoint is not None
        self.score: Score | None = None  # the last validation's
        self.best: Best | None = None  # the best epoch so far

    def _plan(self) -> BatchPlan:
        run = self.run
        training = self.cfg.training
        size = training.batch_size
        effective = size * training.gradient_accumulation_steps * run.world_size
        plan = BatchPlan(
            num_samples=len(self.train_set),
            effective_batch=effective,
            at_once=size if live_of(run).parts.search is None else read_at_once(effective),
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

    def _on_device(self, module: nn.Module) -> nn.Module:
        training = self.cfg.training
        counts = [(p.numel(), p.requires_grad) for p in module.parameters()]
        log.info(
            "model: %s, %d of %d parameters are trained",
            self.cfg.model.name,
            sum(number for number, is_trained in counts if is_trained),
            sum(number for number, _ in counts),
        )
        if training.gradient_checkpointing and not models.enable_gradient_checkpointing(module):
            log.warning("training.gradient_checkpointing: this model has none, it has no effect")
        module = module.to(self.device)
        if self.is_sharded:
            if self.precision.scaler.is_enabled():
                raise ConfigError(
                    "training.sharding=fsdp: this GPU has no bfloat16, and float16 with a scaler "
                    "does not go with shards; write training.mixed_precision=false"
                )
            sharding.shard(module)
        live_of(self.run).reports.record_memory(f"model moved to {self.device}")
        return module

    def resume(self) -> None:
        """Resume from the last intact checkpoint, if any."""
        run = self.run
        if run.is_main:
            self.folder.remove_leftovers(run.resume_checkpoint)
        if run.resume_checkpoint is not None:
            checkpoint = read_newest(
                run.resume_checkpoint,
                REQUIRED,
                share=sharding.shares(self.net, self.optimizer) if self.is_sharded else None,
                gather=of_all_ranks,
            )
            if checkpoint is not None:
                path, content = checkpoint
                self._restore(content, path)
                log.info("resumed from %s, step %d", path, self.position.step)
                self._skip_to(live_of(run).saves.skips_to)
        if run.world_size > 1:
            if not self.is_sharded:
                # all ranks have read the checkpoint when this returns, and hold the same weights
                self.model = Replicated(self.net)
            seed_rank(self.cfg.seed, self.position.step, run.rank)
        self.reporter.begin(self.position, self._total_steps())

    def _skip_to(self, step: int) -> None:
        """Skip the data of this epoch up to ``step``, because training diverged on it."""
        position = self.position
        steps = max(step - self.position.step, 0)
        for _ in range(min(steps, self.plan.steps_left(position.samples))):
            position.samples += self.plan.samples_in_step(position.samples)

    def _total_steps(self) -> int:
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
            self.reporter.epoch_begins()
            self._train_epoch()
            # before validation, which may run out of memory for the first time
            if position.epoch + 1 == epochs or not self.has_checkpoint:
                self._save()
            self.score = self._evaluate(self.splits.validation)
            train_loss = self.epoch_loss.value()
            self.reporter.epoch(position, train_loss, self.score)
            self._keep_if_best(self.score)
            position.epoch += 1
            position.samples = 0
            self.epoch_loss = LossAverage()

    def _keep_if_best(self, score: Score) -> None:
        """Keep the weights if this epoch is the best so far. All ranks call it."""
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
        """Train the epoch's steps from the current position on."""
        run = self.run
        position = self.position
        models.set_train_mode(self.net)
        steps = list(self.plan.steps(position.epoch, position.samples))
        # A rank without a sample of the step takes part with a sample that has no weight.
        reads = [share or [[0]] for share in steps]
        batches = live_of(run).speed.measure_waits(
            self._batches(
                self.train_set, list(itertools.chain.from_iterable(reads)), position.epoch
            )
        )
        decides_late = all(group.get("fused") for group in self.optimizer.param_groups)
        if run.should_stop():
            self._save_and_stop()
        for share, read in zip(steps, reads, strict=True):
            samples = self.plan.samples_in_step(position.samples)
            seen = position.epoch * self.plan.num_samples + position.samples
            lr = self.schedule.rate(seen, samples)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batch = joined(list(itertools.islice(batches, len(read))))
            loss = self._gradients_of(batch, sum(map(len, share)))
            is_step = run.step(
                self.optimizer, self.precision.scaler, self.cfg.training.max_grad_norm
            )
            position.samples += samples
            if is_step:
                position.step += 1
            # With a fused optimizer, `is_step` says whether the previous step was one
            if is_step or decides_late:
                leaves_out = live_of(run).losses.leaves_out
                self.epoch_loss.add(loss, samples, finite=leaves_out)
                self.reporter.step(position, loss, samples, lr, finite=leaves_out)
            # a stop comes first: a checkpoint that is due as well would be saved twice
            if run.should_stop():
                self._save_and_stop()
            if run.should_save():
                self._save(in_background=True)
        # validation may take long
        live_of(run).saves.finish()

    def _batches(
        self, dataset: ImageDataset, chunks: Sequence[Sequence[int]], epoch: int
    ) -> Iterator[Batch]:
        return read_batches(
            dataset, chunks, epoch, self.cfg.training, pinned=self.device.type == "cuda"
        )

    def _gradients_of(self, batch: Batch, samples: int) -> Tensor:
        """Accumulate the gradients of an optimizer step, and return its mean loss."""
        scaler = self.precision.scaler

        def loss_of_part(batch: Batch) -> Tensor:
            return loss_of(
                self.model,
                batch,
                device=self.device,
                precision=self.precision,
                label_smoothing=self.cfg.training.label_smoothing,
            )

        try:
            loss: Tensor = self.run.backward(
                loss_of_part,
                batch,
                self.model,
                length=lambda _: samples,
                backward=lambda loss: torch.autograd.backward(scaler.scale(loss)),
            )
            return loss
        except Exception as error:
            # With a sharded model, all ranks have to save.
            can_save = not self.is_sharded or isinstance(error, RankFailure)
            if can_save and classify_failure(error).kind.is_memory:
                # the step is undone, so the next attempt repeats nothing before it; a failure to
                # save must not hide this one
                with contextlib.suppress(Exception):
                    self._save()
            raise

    @torch.no_grad()
    def _evaluate(self, source: Images) -> Score:
        """Score the model, and stop if requested.

        With several ranks, each scores its share, and all get the total. The model runs without its
        wrapper, in which the ranks would wait for each other.
        """
        run = self.run
        size = self.plan.at_once
        dataset = ImageDataset(source, self.images)
        samples = range(len(dataset))
        batches_of_rank = in_order(share_of(samples, run.rank, run.world_size), size)
        rounds = len(in_order(share_of(samples, 0, run.world_size), size))
        # Every rank joins each pass. Samples that only pad the last pass do not count.
        chunks: list[Sequence[int]] = [*batches_of_rank, *[[0]] * (rounds - len(batches_of_rank))]
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
        for number, batch in enumerate(self._batches(dataset, chunks, 0)):
            scores = run.forward(score, batch, self.net)
            if number < len(batches_of_rank):
                sums += torch.stack(scores).sum(dim=0)
            if run.should_stop():
                self._save_and_stop()
        if run.world_size > 1:
            dist.all_reduce(sums)
        loss, hits, count = sums.tolist()
        return Score(hits / count, loss / count)

    def _save_and_stop(self) -> NoReturn:
        self._save()
        raise TrainingStopped(f"stopped after step {self.position.step}")

    def _save(self, *, in_background: bool = False) -> None:
        """Save a checkpoint."""
        step = self.position.step
        self.has_checkpoint = True
        live_of(self.run).saves.finish()
        if self.run.is_main or self.is_sharded:
            save = self.folder.save_from_copy if in_background else self.folder.save
            live_of(self.run).saves.try_to_write(lambda: save(self._content(), step))

    def _content(self) -> dict[str, object]:
        """Return what to save, everything needed to resume as if nothing had happened: tensors
        (shared with the run, not copied) and plain values."""
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
        """Restore what `_content` returned."""
        self._check_identity(content, path)
        try:
            models.load_trained_state(self.net, content["model"])
            self.optimizer.load_state_dict(with_own_kernels(content["optimizer"], self.optimizer))
        except (ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"checkpoint {path}: {reason}") from error
        # empty if the checkpoint was written without scaling, e.g. on the CPU
        if self.precision.scaler.is_enabled() and content["scaler"]:
            self.precision.scaler.load_state_dict(content["scaler"])
        restore_rng(content["rng"], self.device)
        self.position = EpochPosition(**content["position"])
        if content.get("best") is not None:
            self.best = Best(**content["best"])
        total, samples = content["epoch_loss"]
        self.epoch_loss = LossAverage(total, samples)
        # a size that fits one kind of device need not fit another
        if content.get("device") == self._kind_of_device():
            self.run.micro_batcher.restore(content["micro_batch"])

    def _kind_of_device(self) -> str:
        kind = self.device.type
        return torch.cuda.get_device_name(self.device) if kind == "cuda" else kind

    def _identity(self) -> dict[str, str]:
        """Return the values that a checkpoint must share with a run that resumes from it."""
        identity = {
            "seed": str(self.cfg.seed),
            "training samples": str(self.plan.num_samples),
            "classes": str(self.splits.shape.num_classes),
        }
        for group in ("model", "dataset"):
            for key, value in self.cfg[group].items():
                identity[f"{group}.{key}"] = str(value)
        return {key: value for key, value in identity.items() if key not in _NOT_IDENTITY}

    def _check_identity(self, content: Mapping[str, Any], path: Path) -> None:
        if content["format"] != FORMAT:
            raise ConfigError(
                f"checkpoint {path}: has format {content['format']}, this version reads {FORMAT}"
            )
        here = self._identity()
        there = content["identity"]
        differences = [
            f"{key} was {there.get(key, 'absent')}, now {here.get(key, 'absent')}"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]
        if differences:
            raise ConfigError(
                f"checkpoint {path}: belongs to another run: {'; '.join(differences)}; use the "
                "same values, or another run folder to start afresh"
            )

    def _weights(self, **scores: float) -> dict[str, Any]:
        """Return the content of a file with the trained weights. All ranks call it."""
        weights: Any = models.trained_state(self.net)
        if self.is_sharded:  # only the main rank gets the whole weights
            weights = sharding.whole(weights, keeps=self.run.is_main)
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
        if not validation:
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
