"""The object ``run``, through which a trainer reports progress, saves, loads and stops.

The runner passes it to the trainer in the process that trains; a script gets it from
``current_run()``. It is the documented part of an attempt, and :class:`.live.LiveAttempt` does the
work.
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
        world_size: how many ranks share the optimizer steps. Other ranks than rank 0 may report
            progress, checkpoints, epochs and a result as well; their reports are ignored.
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

        Call it once after each optimizer step. With several ranks, every rank must call it, and all
        ranks see a request at the same step. A trainer that calls neither this method nor
        :meth:`should_save` is interrupted by :class:`TrainingStopped`, wherever it is.
        """
        return self._live.should_stop()

    def should_save(self) -> bool:
        """Return whether to save a checkpoint now, either with :meth:`save` or in another way that
        :meth:`checkpoint_saved` reports.

        A checkpoint is due when it is time, when someone requests one, and before a requested stop.
        Call this once after each optimizer step. With several ranks, every rank must call it; rank
        0's clock counts, and all ranks see it at the same step.

        A trainer that never calls :meth:`should_stop` ends after the checkpoint before a stop, at
        its next call of this method or of :meth:`backward`.

        Raises:
            TrainingStopped: the last checkpoint before a stop has been saved.
        """
        return self._live.should_save()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background, and report it.

        Every attempt does this at its end. A script needs to call it only if it ends its process
        early, for example with ``os._exit``.
        """
        self._live.saves.finish()

    def checkpoint_failed(self, reason: str) -> None:
        """Report that a checkpoint could not be saved. Training continues, the user is notified,
        and :meth:`should_save` returns true again in a minute."""
        self._live.checkpoint_failed(reason)

    def started(self, step: int) -> None:
        """Report the optimizer step that this attempt starts from, 0 for a fresh start."""
        self._live.reports.started(int(step))

    def progress(self, /, step: int, *, total_steps: int | None = None, **scalars: float) -> bool:
        """Report that optimizer step ``step`` is done. The ``scalars`` (loss, lr …) go to the
        journal.

        Call it after every step: at most ten reports per second are sent. Figures on a GPU are sent
        when they have arrived on the host, at the latest with the next report, so that training
        does not wait for the GPU. Returns whether this report is sent.
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

        If memory runs out, the step is undone and repeated in smaller parts. For the arguments see
        :meth:`robust_train.step.batcher.MicroBatcher.backward`.
        """
        return self._live.backward(loss_of, batch, model, **options)

    def step(
        self, optimizer: Optimizer, scaler: Any = None, max_grad_norm: float | None = None
    ) -> bool:
        """End an optimizer step: clip the gradients, update the weights, release the gradients::

            loss = run.backward(loss_of, batch, model)
            run.step(optimizer, max_grad_norm=1.0)

        If the loss of :meth:`backward` or the norm of the gradients is not finite, all ranks skip
        the update, and weights and optimizer stay unchanged. With ``fused=True`` in the optimizer,
        the GPU decides this and the host does not wait. With any other optimizer, the host waits
        for the backward pass to read the figures.

        Args:
            optimizer: the optimizer of the trained parameters.
            scaler: a ``GradScaler``, if the losses were scaled. An overflow that it skips does not
                count as divergence.
            max_grad_norm: the norm to which all gradients together are clipped.

        Returns:
            Whether the weights have changed. With ``fused=True`` this is the answer for the
                previous call, and true in the first call, because the host does not wait for the
                GPU. ``if run.step(optimizer): scheduler.step()`` still counts right, one step
                later.

        Raises:
            TrainingDiverged: more than three times ``divergence.patience`` updates in a row were
                skipped.
        """
        return self._live.step(optimizer, scaler, max_grad_norm)

    def forward(
        self, function: Callable[[Any], T], batch: Any, model: Models = None, **options: Any
    ) -> list[T]:
        """Call ``function`` for each part of a batch, and return the results in order::

            with torch.no_grad():
                logits = torch.cat(run.forward(model, batch))

        If memory runs out, the part that failed is repeated in smaller parts.
        """
        return self._live.forward(function, batch, model, **options)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield from ``loader``, the data to train on, and measure how long training waits for it::

            for batch in run.batches(loader): ...

        Checkpoints store the position in the data. The first pass of a later attempt starts with
        the next sample, even with another batch size: the loader's ``load_state_dict`` is called if
        it has one, otherwise samples are skipped. The order of samples must be the same again, for
        example through a generator that is seeded with the epoch. If that is uncertain, a warning
        is logged.
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

        Objects with a ``state_dict()`` are saved as their state dict. The state is copied to host
        memory now, and the copy is written while training continues. If there is no memory for a
        copy, the state is written at once. The newest ``training.keep_checkpoints`` checkpoints are
        kept. If the disk does not take a checkpoint, a warning is logged and training continues.
        With several ranks, rank 0 saves. Sharded tensors are refused.

        Args:
            state: the values and objects to save, by name.
            step: the number of finished optimizer steps.
            metric: the quality of the state. The best checkpoint so far is kept as
                ``checkpoints/best.pt``.
            mode: ``min`` if a smaller metric is better, as for a loss.
        """
        self._live.save(state, step, metric, mode)

    def load(self, state: MutableMapping[str, Any]) -> int:
        """Load the newest checkpoint of :meth:`save` into ``state``, and report that training
        starts.

        Calls ``load_state_dict()`` if an object has it, and replaces all other values. With several
        ranks, every rank must call it, and all resume from the same checkpoint. Returns the number
        of finished optimizer steps, 0 for a fresh start.
        """
        return self._live.load(state)

    def checkpoint_saved(self, path: Path, step: int | None) -> None:
        """Report a complete checkpoint at ``path``, so that a later attempt resumes from it."""
        self._live.checkpoint_saved(path, step)

    def epoch_ended(self, /, epoch: int, **scalars: float) -> None:
        """Report that epoch ``epoch`` (from 1) is done. The ``scalars`` go to the journal."""
        self._live.epoch_ended(epoch, **scalars)

    def report(self, value: float, step: int | None = None) -> None:
        """Report the figure that a sweep optimises, after ``step`` (default: the last step of
        :meth:`progress`).

        A sweep may stop a job that is worse than other jobs at the same step. So report at the same
        steps in all jobs, for example after each epoch.
        """
        self._live.reports.report(value, step)

    def record(self, event: str, fields: Mapping[str, Json]) -> None:
        """Record a trainer's own event in the journal, with any name and any fields."""
        self._live.reports.record(event, fields)


def live_of(run: Run) -> LiveAttempt:
    """Return the attempt behind a run, for this package's code."""
    return run._live
