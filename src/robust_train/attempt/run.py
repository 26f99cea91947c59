"""The object ``run`` that a trainer with a second parameter gets, to read and report through.

It lives in the process that trains. All kinds of attempts use the same class, and their reports go
to different places. :class:`.live.LiveAttempt` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from robust_train.attempt.live import LiveAttempt
from robust_train.attempt.reports import Report
from robust_train.host.votes import Flags
from robust_train.model.events import Json

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from robust_train.step.batcher import MicroBatcher
    from robust_train.step.reachable import Models

T = TypeVar("T")


class Run:
    """One attempt as its trainer sees it.

    Attributes:
        attempt: number of this attempt, counted from 1.
        rank: number of this process among those that share the optimizer steps, from 0.
        world_size: how many ranks share the optimizer steps. Only rank 0's progress, checkpoints,
            epochs and result count; the others may report them as well.
        is_main: whether this is rank 0, which saves the checkpoints and reports.
        run_dir: the job's run folder.
        checkpoint_dir: the folder for checkpoints, shared by all attempts of the job.
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
    ) -> None:
        self._live = LiveAttempt(
            run_dir=run_dir,
            attempt=attempt,
            resume_checkpoint=resume_checkpoint,
            report=report,
            rank=rank,
            world_size=world_size,
            flags=flags,
        )
        self.attempt = attempt
        self.rank = rank
        self.world_size = world_size
        self.is_main = self._live.is_main
        self.run_dir = run_dir
        self.checkpoint_dir = self._live.checkpoint_dir

    @property
    def resume_checkpoint(self) -> Path | None:
        """The checkpoint to resume from, None for a fresh start."""
        return self._live.saves.resume_checkpoint

    @property
    def last_step(self) -> int | None:
        """The last optimizer step that was reported, None before the first."""
        return self._live.reports.last_step

    @property
    def micro_batcher(self) -> MicroBatcher:
        """The micro-batcher, which splits this attempt's batches."""
        return self._live.parts.batcher()

    def should_stop(self) -> bool:
        """Return whether to save a checkpoint now and raise :class:`TrainingStopped`.

        Call it once after each optimizer step, with several ranks on each of them: then all see it
        at the same step. A trainer that calls neither this nor :meth:`should_save` gets a
        KeyboardInterrupt instead.
        """
        return self._live.should_stop()

    def should_save(self) -> bool:
        """Return whether to save a checkpoint now, by :meth:`save` or in another way that
        :meth:`checkpoint_saved` reports.

        It is time, someone requested a checkpoint, or it is the last checkpoint before a requested
        stop. Call it once after each optimizer step, with several ranks on each of them: rank 0's
        clock counts, and all see it at the same step.

        A trainer that never calls :meth:`should_stop` is ended after that last checkpoint, when it
        calls this again or :meth:`backward`.

        Raises:
            TrainingStopped: the last checkpoint before a stop has been saved.
        """
        return self._live.should_save()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background, and report it. Attempts do
        that at their end. A script that ends its process in another way calls it."""
        self._live.saves.finish()

    def checkpoint_failed(self, reason: str) -> None:
        """Report that no checkpoint could be saved: training continues, the user is notified, and
        :meth:`should_save` returns true again in a minute."""
        self._live.checkpoint_failed(reason)

    def started(self, step: int) -> None:
        """Report which optimizer step this attempt starts from (0 for a fresh start)."""
        self._live.reports.started(int(step))

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """Report that optimizer step ``step`` is done. The ``scalars`` (loss, lr …) go to the
        journal.

        It may be called after every step: at most ten reports a second are passed on. Returns
        whether this report was. A report with a figure on a GPU is sent when that has arrived on
        the host, at the latest with the next report: nothing waits for the GPU.
        """
        return self._live.progress(step, total_steps=total_steps, **scalars)

    def backward(
        self, loss_of: Callable[[Any], Any], batch: Any, model: Models = None, **options: Any
    ) -> Any:
        """Add the gradients of a batch's mean loss, and return that mean, detached::

            def loss_of(batch):                 # any part of the batch
                x, y = batch
                return cross_entropy(model(x.to(device)), y.to(device))

            optimizer.zero_grad()
            loss = run.backward(loss_of, batch, model)
            run.step(optimizer)

        If memory runs out, the call starts over with smaller parts, as if the step had not begun.
        For the arguments see :meth:`robust_train.step.batcher.MicroBatcher.backward`.
        """
        return self._live.backward(loss_of, batch, model, **options)

    def step(
        self, optimizer: Optimizer, scaler: Any = None, max_grad_norm: float | None = None
    ) -> bool:
        """End an optimizer step: clip the gradients, update the weights, drop the gradients::

            loss = run.backward(loss_of, batch, model)
            run.step(optimizer, max_grad_norm=1.0)

        If the loss of :meth:`backward` or the gradients' norm is not finite, all ranks skip the
        update, and weights and optimizer stay as they were. An optimizer made with ``fused=True``
        decides that on the GPU without waiting, and the host counts it a step later. For any other
        optimizer the host reads a figure, and waits for the backward pass.

        Args:
            optimizer: the optimizer of the trained parameters.
            scaler: a ``GradScaler``, if the losses were scaled. An overflow that it skips is not a
                divergence.
            max_grad_norm: clip the norm of all gradients to this.

        Returns:
            Whether the weights have changed. With ``fused=True`` the GPU decides, and nothing waits
                for it, so the answer is that of the previous call, and true in the first call. So
                ``if run.step(optimizer): scheduler.step()`` counts right, a step later.

        Raises:
            TrainingDiverged: more than three times ``divergence.patience`` updates in a row were
                skipped.
        """
        return self._live.step(optimizer, scaler, max_grad_norm)

    def forward(
        self, function: Callable[[Any], T], batch: Any, model: Models = None, **options: Any
    ) -> list[T]:
        """Return the results of ``function`` for the parts of a batch, in order::

            with torch.no_grad():
                logits = torch.cat(run.forward(model, batch))

        If memory runs out, the failed part is repeated in smaller parts.
        """
        return self._live.forward(function, batch, model, **options)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield from ``loader``, the data to train on, and measure how long training waits for it::

            for batch in run.batches(loader): ...

        Checkpoints keep the position: the first pass of an attempt resumes after the last sample,
        by the loader's ``load_state_dict``, else by skipping the samples before it, whatever the
        batch size is by then. The order of samples has to be the same again, for example by a
        generator that is seeded with the epoch. If that is uncertain, a warning comes first.
        """
        return self._live.batches(loader)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metric: float | None = None,
        *,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        """Save a checkpoint while training continues::

            state = {"model": model, "optimizer": optimizer, "best": 0.0}
            for step in range(run.load(state) + 1, 1001):
                ...
                run.progress(step, total_steps=1000)
                if run.should_save():
                    run.save(state, step)

        Objects with a ``state_dict()`` are saved as their state dict. The state is copied to the
        host's memory now and written during training, whole or not at all. Without room for a copy
        it is written at once. The newest ``training.keep_checkpoints`` stay. If the disk does not
        take it, that costs a warning. With several ranks, rank 0 saves. Sharded tensors are
        refused.

        Args:
            state: what to save, by name.
            step: optimizer steps that are done.
            metric: how good the state is. The best checkpoint so far stays as
                ``checkpoints/best.pt``, whatever is saved later.
            mode: ``min`` if the smallest metric is the best, as with a loss.
        """
        self._live.save(state, step, metric, mode)

    def load(self, state: MutableMapping[str, Any]) -> int:
        """Restore a checkpoint of :meth:`save` into ``state``, and report that training begins.

        Calls ``load_state_dict()`` where available and replaces all other values. With several
        ranks, all have to call it, and resume from the same checkpoint. Returns the number of
        finished optimizer steps, 0 for a fresh start.
        """
        return self._live.load(state)

    def checkpoint_saved(self, path: Path, step: int | None) -> None:
        """Report a complete checkpoint at ``path``: a later attempt resumes from it."""
        self._live.checkpoint_saved(path, step)

    def epoch_ended(self, /, epoch: int, **scalars: float) -> None:
        """Report that epoch ``epoch`` (from 1) is done. The ``scalars`` go to the journal."""
        self._live.epoch_ended(epoch, **scalars)

    def report(self, value: float, step: int | None = None) -> None:
        """Report the figure that a sweep optimises, as it is after ``step`` (default: the last step
        of :meth:`progress`). A sweep may stop a job that does worse than others at the same step,
        so report at the same steps in all jobs, for example after each epoch."""
        self._live.reports.report(value, step)

    def record(self, event: str, fields: Mapping[str, Json]) -> None:
        """Record a trainer's own event in the journal, with any name and any fields."""
        self._live.reports.record(event, fields)


def live_of(run: Run) -> LiveAttempt:
    """Return the attempt behind a run, for this package's code."""
    return run._live
