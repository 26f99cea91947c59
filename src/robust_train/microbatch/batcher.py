"""Repeat just the optimizer step in which memory runs out, with finer parts.

A loop cannot repeat a body that has raised, so each part is a context manager: it takes the
out-of-memory error, and the loop starts over with smaller parts. Gradients are weighted by samples,
so every split gives the gradient of the mean loss over the whole batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from robust_train.batch.search import BatchSearch
from robust_train.microbatch import record, splitting
from robust_train.microbatch.micro_batches import MicroBatches
from robust_train.microbatch.part import MicroBatch
from robust_train.microbatch.probing import probe_parts
from robust_train.microbatch.rewind import Models, StepStart, Watch
from robust_train.microbatch.size import MicroBatchSize, SizeState
from robust_train.speed.meter import SpeedMeter

log = logging.getLogger("robust_train")


class MicroBatcher:
    """Splits batches so that they fit into memory, and remembers what fits.

    Args:
        batch_size: most samples in one forward and backward pass; None: the whole batch at first.
        min_batch_size: parts of this many samples are not split further: the error is raised.
        gradient_accumulation_steps: the requested one; divisors of the effective batch are
            preferred.
        regrow_after_steps: see :class:`robust_train.microbatch.size.MicroBatchSize`; None: never.
        on_event: called with an event at every change of the size.
        step: returns the number of the optimizer step, from 1; by default they are counted here.
        on_oom: called with the error when memory ran out, before anything is released.
        search: find the largest size that fits in the first step, by at most four parts of the
            batch that are only measured.
        speed: measures the steps, in the launcher's attempts.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        *,
        min_batch_size: int = 1,
        gradient_accumulation_steps: int = 1,
        regrow_after_steps: int | None = None,
        on_event: record.OnEvent | None = None,
        step: Callable[[], int] | None = None,
        on_oom: Callable[[BaseException], None] | None = None,
        search: BatchSearch | None = None,
        speed: SpeedMeter | None = None,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("min_batch_size", min_batch_size),
            ("gradient_accumulation_steps", gradient_accumulation_steps),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        self._training, self._other = (
            MicroBatchSize(
                batch_size,
                min_batch_size=min_batch_size,
                gradient_accumulation_steps=gradient_accumulation_steps,
                regrow_after_steps=regrow_after_steps,
            )
            for _ in range(2)
        )
        self.on_event: record.OnEvent = on_event or (lambda event: None)
        self.on_oom = on_oom or (lambda error: None)
        self.speed = speed or SpeedMeter()
        self.watch = Watch()
        self._step = step
        self._search = search
        self._steps_begun = 0

    @property
    def training_size(self) -> MicroBatchSize:
        """The size in use for training, and what is known about others."""
        return self._training

    @property
    def size(self) -> int | None:
        """Most samples in one pass of training, None as long as that is the whole batch."""
        return self._training.current

    def micro_batches(
        self,
        # tensors, arrays or lists in any nesting of tuples, mappings and dataclasses, all with one
        # sample per index of their first dimension
        batch: Any,
        # what gets gradients: a module or several. None: every module and optimizer in this
        # process, which are looked for once.
        model: Models = None,
        *,
        # an optimizer step: memory running out in any part repeats all of it. False for validation
        # under `torch.no_grad()`: only the part that failed is repeated.
        training: bool = True,
        # of how many items the loss over some data is a mean, where these are not the samples; for
        # a sum `lambda data: 1`
        count: splitting.Count | None = None,
        # number of samples of such a batch, where it cannot be seen
        length: splitting.Length | None = None,
        # `split(batch, start, stop)`, where the batch cannot be sliced
        split: splitting.Split | None = None,
    ) -> MicroBatches:
        """Return the parts of ``batch``, to loop over::

            for micro in batcher.micro_batches(batch, model):
                with micro:
                    x, y = micro.data
                    micro.backward(criterion(model(x), y))

        Raises:
            TypeError, ValueError: the number of samples cannot be seen.
        """
        samples = (length or splitting.length_of)(batch)
        size = self._training if training else self._other
        parts = splitting.Parts(batch, samples, split=split, count=count)
        return MicroBatches(self, size, parts, model, training)

    def shrink(self, reason: str) -> tuple[int, int] | None:
        """Split finer from the next batch on, on request; return (from, to), or None."""
        changed = self._training.shrink()
        if changed:
            self._other.shrink()
            record.changed(self.on_event, self.step_number(begins=False), *changed, reason)
        return changed

    def state(self) -> dict[str, SizeState]:
        """Return the sizes in use, for a checkpoint."""
        return {"training": self._training.state(), "other": self._other.state()}

    def restore(self, state: dict[str, SizeState]) -> None:
        """Take over :meth:`state`'s result, unless another batch size was requested since."""
        self._training.restore(state["training"])
        self._other.restore(state["other"])

    def probe(self, batches: MicroBatches, start: StepStart) -> Iterator[MicroBatch]:
        """Yield, before the first step, the parts by which the size is searched for, if it is."""
        search, self._search = self._search, None
        found = None if search is None else (yield from probe_parts(search, batches, start))
        if search is not None and found is not None:
            for size in (self._training, self._other):
                size.begin_at(found.batch_size)
            record.found(self.on_event, search, found)

    def step_number(self, *, begins: bool) -> int:
        """Return the number of the optimizer step, from 1."""
        self._steps_begun += begins
        return self._steps_begun if self._step is None else self._step()
