"""Recovery inside the steps of a framework's own trainer, as far as it is the same for all."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from robust_train.errors import UserError
from robust_train.microbatch.open_step import CannotSplit, OpenStep, like, no_collectives
from robust_train.microbatch.ranks import SharedStep
from robust_train.microbatch.splitting import joined, length_of
from robust_train.run import Run
from robust_train.values import Failure

log = logging.getLogger("robust_train.integrations")


class InStep:
    """Whether and how the steps and evaluations of a trainer are repeated in smaller parts."""

    def __init__(self, run: Run, framework: str) -> None:
        self.is_on = True  # False once the model turned out to be one that cannot be split
        self._run = run
        self._framework = framework
        self._batcher = run.micro_batcher
        self._said = False

    def say(self, reason: str, *, on_all_ranks: bool = False) -> None:
        """Log why memory that runs out ends the attempt; later reasons change nothing."""
        if not self._said:
            kept = self._run.keeps_batch
            log.log(
                logging.DEBUG if on_all_ranks and not self._run.is_main else logging.WARNING,
                "%s: where memory runs out, a new attempt %s; no step is repeated in smaller "
                "parts: %s%s",
                self._framework,
                "has the same batch" if kept else "has half the micro-batch",
                reason,
                f"; {kept}" if kept else "",
            )
            self._said = True
            self._run.splits_no_more()

    def begin(self, model: nn.Module, **options: Any) -> OpenStep | None:
        """Begin an optimizer step; None where the framework has to run it by itself."""
        shared = self._shared(model) if self.is_on else None
        if shared is None:
            return None
        return OpenStep(self._batcher, model, shared, say=self.say, **options)

    def samples_of(self, batch: Any) -> int | None:
        """Return the samples in a batch, None where it cannot be cut."""
        try:
            samples = length_of(batch, is_strict=True)
        except (TypeError, ValueError) as error:
            self.say(str(error).partition(";")[0])
            return None
        # a lone sample, or several that were packed into one
        return samples if samples > 1 else None

    def evaluate(
        self, model: nn.Module, batch: Any, body: Callable[[Any, int], Any]
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        """Run ``body(data, samples)`` for a batch in parts that fit; return results and bounds."""
        samples = self.samples_of(batch) if self.is_on else None
        shared = None if samples is None else self._shared(model)
        if samples is None or shared is None:
            return [body(batch, 0)], [(0, 0)]
        results: list[Any] = []
        bounds: list[tuple[int, int]] = []
        failure: Failure | None = None
        parts = self._batcher.micro_batches(
            batch, model, training=False, length=lambda _: samples or 0
        )
        with shared.without_collectives():
            for micro in parts:
                try:
                    with micro, no_collectives() if failure else contextlib.nullcontext():
                        results.append(body(micro.data, len(micro)))
                        bounds.append((micro.start, micro.stop))
                except CannotSplit as reason:
                    self.say(str(reason))
                    raise like(failure) from None
                failure = micro.failure or failure
        return results, bounds

    def joined(self, found: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Return a batch's result of those of its parts; run out of memory if they don't fit."""
        try:
            return joined(found, sizes)
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
