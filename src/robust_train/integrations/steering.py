"""How a framework's trainer is steered, as far as it is the same for all: the effective batch, what
is sent of each step, and recovery inside the steps."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from robust_train.attempt.run import Run, live_of
from robust_train.compat import TorchDispatchMode
from robust_train.config.checks import unchecked
from robust_train.config.placeholders import SavePlan
from robust_train.config.trainers import require
from robust_train.model.errors import UserError
from robust_train.model.events import BatchKept
from robust_train.model.failure import Failure, FailureKind
from robust_train.step import ranks, splitting
from robust_train.step.engine import Step
from robust_train.step.loss_passes import LossOf
from robust_train.step.part_runner import Batch, Body, CannotSplitError
from robust_train.step.reachable import why_not_again
from robust_train.step.shared_step import SharedStep
from robust_train.step.splitting import Count, Part, Parts

log = logging.getLogger("robust_train.integrations")


def framework(module: str) -> Any:
    """Return a module of the framework that an integration of its name needs."""
    name = module.partition(".")[0]
    return require(module, f"robust_train.integrations.{name}", extra=name)


def lightning(module: str = "") -> Any:
    """Return a module of Lightning, under whichever of its two names the program has imported."""
    name = "lightning.pytorch"
    if name not in sys.modules and "pytorch_lightning" in sys.modules:
        name = "pytorch_lightning"
    return framework(f"{name}{module}")


def effective_batch_size(cfg: DictConfig) -> int:
    """Return the samples in an optimizer step, however they are split."""
    ranks = OmegaConf.select(cfg, "num_gpus") or 1
    return int(cfg.training.batch_size * cfg.training.gradient_accumulation_steps * ranks)


def machines() -> int:
    """Return how many machines the ranks are on, as torchrun counts them."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def refuse_saving_on_each_node(owner: str, options: Any) -> None:
    """Raise UserError if every machine would write the same files: all see the run folder."""
    if getattr(options, "save_on_each_node", False) and machines() > 1:
        raise UserError(
            f"{owner}: save_on_each_node=True: all machines would write the same files into the "
            "run folder, which they share; leave it out"
        )


def keep_batch(run: Run, reason: str) -> None:
    """Let no attempt split the batch in another way, which would change the training."""
    live_of(run).parts.keep_batch(reason)
    if run.is_main:
        live_of(run).reports.send(BatchKept(reason))


class Steps:
    """Sends optimizer steps to the launcher: each loss once, memory after the first step."""

    def __init__(self, cfg: DictConfig, run: Run) -> None:
        if live_of(run).is_steered:
            raise UserError(
                "a second fit or loop in one job, which the next attempt would begin with the "
                "checkpoint of the first: make each a job of its own (-m fold=0,1,2), or leave the "
                "other to the framework (trainer.fit, trainer.train)"
            )
        live_of(run).steer(SavePlan.of(unchecked(cfg)))
        self._run = run
        self._every = max(cfg.training.log_every_steps, 1)
        self._loss: dict[str, float] = {}

    def log_loss(self, loss: float) -> None:
        """Send a loss with the next step that is passed on."""
        self._loss = {"loss": loss}

    def done(self, step: int, total_steps: int | None, loss: Any = None) -> None:
        """Send that optimizer step ``step`` is done, now and then with its loss."""
        if loss is not None:
            live_of(self._run).losses.take(step, loss)
            if step % self._every == 0:  # reading it waits for the GPU
                self._loss = {"loss": float(loss)}
        is_first = self._run.last_step is None
        if self._run.progress(step, total_steps=total_steps, **self._loss):
            self._loss = {}
        if is_first:
            live_of(self._run).reports.record_memory("first step done")


def result_of(metric: str | None, logged: Mapping[str, float]) -> Any:
    """Return ``metric`` from what was logged last, or all of that if it is None.

    Raises:
        UserError: it was not logged.
    """
    if metric is None:
        return dict(logged)
    if metric not in logged:
        names = ", ".join(sorted(logged)) or "none"
        raise UserError(f"metric={metric}: was not logged; there are {names}")
    return logged[metric]


# --- recovery inside the steps ---


class OpenStep(Step[Any]):
    """The step in progress. Call `run_batch` for each of its batches, then drop it.

    Ranks run their batches independently, since parts send nothing. They exchange a message after
    the step's last batch.
    """

    # a framework may log through them; only a repeat may not
    refuses_collectives = False

    def __init__(
        self,
        *args: Any,
        say: Callable[[str], None],  # gets the reason why it cannot start over
        on_rewind: Callable[[], None] = lambda: None,  # is called when it does
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._say = say
        self._on_rewind = on_rewind
        self._can_be_cut = True

    def run_batch(
        self,
        data: Any,
        body: Body[Any],
        *,
        count: Count | None = None,
        is_last: bool = True,
        loss_of: LossOf | None = None,
        function: Any = None,
    ) -> list[tuple[Any, Part]]:
        """Return the results of a batch's parts. In training, the last batch ends the step."""
        samples = self._samples_of(data)
        whole = data
        # a lone sample, or several that were packed into one
        self._can_be_cut = samples > 1
        if self._can_be_cut:
            # views: the structure as it is now, whatever a body does to it
            whole = splitting.part_of(data, 0, samples)
        parts = Parts(whole, max(samples, 1), count=count, counts_whole=False)

        def on_original(part: Part) -> Any:
            return body(replace(part, data=data) if part.is_whole else part)

        try:
            results = self.run(Batch(parts, on_original, loss_of, function), is_last=is_last)
            if is_last and self.start is not None:
                self.end()
        except CannotSplitError as reason:
            self._say(str(reason))
            failed = self._ran_out
            raise like(failed.failure if failed else None) from None
        return results

    def _samples_of(self, batch: Any) -> int:
        """Return the samples in a batch, 1 if it cannot be cut."""
        try:
            return splitting.length_of(batch, is_strict=True)
        except (TypeError, ValueError) as error:
            self._say(str(error).partition(";")[0])
            return 1

    def rewind_framework(self) -> None:
        self._on_rewind()

    def guard(self) -> AbstractContextManager[object]:
        """Refuse collectives while a rank may repeat work that others do once. They would wait, or
        pair the wrong calls."""
        is_alone = ranks.here() is None
        if is_alone or not self.repeats:
            return contextlib.nullcontext()
        mode: AbstractContextManager[object] = _NoCollectives()  # type: ignore[no-untyped-call]
        return mode

    def cannot_repeat(self) -> str | None:
        if not self._can_be_cut:
            return "the batch is a lone sample, or several that are packed into one"
        return super().cannot_repeat()

    def log_why(self, reason: str) -> None:
        self._say(reason)


class InStep:
    """Whether and how the steps and evaluations of a trainer are repeated in smaller parts."""

    def __init__(self, run: Run, framework: str) -> None:
        # False once the model turned out to be one that cannot be split
        self.is_on = True
        self._run = run
        self._framework = framework
        self._batcher = run.micro_batcher
        self._said = False
        self._has_begun = False

    def say(self, reason: str, *, on_all_ranks: bool = False) -> None:
        """Log why running out of memory ends the attempt. Later reasons change nothing."""
        if self._said:
            return
        kept = live_of(self._run).parts.keeps_batch
        log.log(
            logging.DEBUG if on_all_ranks and not self._run.is_main else logging.WARNING,
            "%s: where memory runs out, a new attempt %s; no step is repeated in smaller "
            "parts: %s%s",
            self._framework,
            "has the same batch" if kept else "has half the micro-batch",
            reason,
            f"; {kept}" if kept and kept != reason else "",
        )
        self._said = True
        live_of(self._run).parts.stop_splitting()

    def keep_batch(self, reason: str) -> None:
        """Neither repeat a step nor let an attempt split its batch in another way."""
        self.is_on = False
        keep_batch(self._run, reason)
        self.say(reason, on_all_ranks=True)

    def begin(
        self,
        model: nn.Module,
        *,
        on_rewind: Callable[[], None] = lambda: None,
        keeps_gradients: bool = True,
    ) -> OpenStep | None:
        """Begin an optimizer step, or None if the framework has to run it by itself."""
        if self.is_on and not self._has_begun:
            # The framework has created its optimizer by this point.
            self._has_begun = True
            reason = why_not_again(model)
            if reason is not None:
                self.keep_batch(reason)
        shared = self._shared(model) if self.is_on else None
        if shared is None:
            return None
        return self._batcher.open_step(
            partial(OpenStep, say=self.say, on_rewind=on_rewind),
            model,
            shared,
            keeps_gradients=keeps_gradients,
        )

    def evaluate(self, model: nn.Module, batch: Any, body: Body[Any]) -> list[tuple[Any, Part]]:
        """Run a validation batch in parts that fit, and return each part's result."""
        shared = self._shared(model) if self.is_on else None
        if shared is None:
            whole = Part(batch, 1.0)
            return [(body(whole), whole)]
        kind = partial(OpenStep, say=self.say)
        step = self._batcher.open_evaluation(kind, model, shared)
        return step.run_batch(batch, body)

    def joined(self, results: Sequence[tuple[Any, Part]]) -> Any:
        """Join the results of a batch's parts. Runs out of memory if they do not fit."""
        try:
            return splitting.join_parts(
                [result for result, _ in results], [len(part) for _, part in results]
            )
        except ValueError as error:
            self.say(f"the results of parts cannot be put together: {error}")
            raise like(None) from None

    def _shared(self, model: nn.Module) -> SharedStep | None:
        try:
            shared = SharedStep([model])
            reason = "its weights are sharded" if shared.is_sharded else None
        except UserError as error:
            reason = str(error)
        if reason is None:
            return shared
        self.is_on = False
        self.say(reason)
        return None


def like(failure: Failure | None) -> Exception:
    """Return an error of the same kind as the error for which a pass was to be repeated."""
    message = "" if failure is None else failure.message
    message = message.removeprefix("OutOfMemoryError: ") or "out of memory"
    is_hosts = failure is not None and failure.kind is FailureKind.HOST_OOM
    return MemoryError(message) if is_hosts else torch.OutOfMemoryError(message)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CannotSplitError(
                f"it calls the collective {func.name().partition('::')[2]}, for which the other "
                "ranks would wait"
            )
        return func(*args, **(kwargs or {}))
