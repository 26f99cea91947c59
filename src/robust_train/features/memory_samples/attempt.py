"""Starts and stops the thread that samples an attempt's memory, in the process that trains."""

from __future__ import annotations

from robust_train.attempt.hooks import InAttempt
from robust_train.attempt.live import LiveAttempt
from robust_train.config.schema import RobustConfig
from robust_train.features.memory_samples.model import SamplesKeys
from robust_train.features.memory_samples.sampler import Sampler


class TakesSamples(InAttempt):
    """Runs the sampler if ``memory.samples`` is true.

    Only rank 0 takes samples, because the ranks that robust-train starts share each step equally.
    The ranks of an engine may be on several hosts, so each of them takes samples.
    """

    def __init__(self, live: LiveAttempt, config: RobustConfig) -> None:
        super().__init__(live, config)
        self._sampler: Sampler | None = None
        is_sampled = live.is_main or config.runs_inline
        if is_sampled and config.of(SamplesKeys).samples:
            self._sampler = Sampler(
                live.run_dir,
                live.attempt,
                config.device,
                read_step=lambda: live.reports.last_step,
                whole_tree=config.traits.is_program,
            )

    def begin(self) -> None:
        """Start sampling."""
        if self._sampler is not None:
            self._sampler.start()

    def end(self, error: BaseException | None) -> None:
        """Write the last sample."""
        if self._sampler is not None:
            self._sampler.stop()
