"""The position of a Lightning fit in its data, also expressed in Lightning's own counters.

Lightning counts batches. A new attempt may have smaller batches than the attempt that wrote the
checkpoint, so robust-train saves the position in samples. When `RobustCallback` loads a checkpoint,
it replaces Lightning's counters with those that `counters_at` computes for the new batch size. For
example, 64 samples of an epoch are 2 batches of 32 or 4 batches of 16.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LightningPosition:
    """A position between two optimizer steps.

    Attributes:
        epoch: the current epoch, counted from 0.
        samples: the samples of this epoch that are done. After an epoch's last sample, both values
            stay until the next epoch starts.
        epoch_samples: the samples in a whole epoch, 0 if unknown.
        step: the number of optimizer steps done.
    """

    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    step: int = 0

    @property
    def is_between_epochs(self) -> bool:
        """Whether the current epoch has not started, or has ended."""
        return self.samples in (0, self.epoch_samples)

    def count_done(self, batch_size: int) -> int:
        """Return how many batches of this epoch are done, as if all had ``batch_size`` samples.

        The number is a whole epoch's batches minus the batches that are left, so that Lightning
        expects as many batches as the loader will yield.
        """
        left = -(-(self.epoch_samples - self.samples) // batch_size)
        return self.count_in_epoch(batch_size) - left

    def count_in_epoch(self, batch_size: int) -> int:
        """Return how many batches of ``batch_size`` samples a whole epoch has."""
        return -(-self.epoch_samples // batch_size)


def counters_at(
    fit_loop: Any, position: LightningPosition, batch_size: int, *, is_manual: bool = False
) -> Any:
    """Return ``checkpoint["loops"]["fit_loop"]`` as if all batches had ``batch_size`` samples.

    Two of Lightning's many restart states are enough: at the end of a batch within an epoch, and
    between two epochs (see ``_TrainingEpochLoop.update_restart_stage`` and
    ``_FitLoop.update_restart_stage``).

    Args:
        fit_loop: the state that Lightning saved. It is not changed.
        position: the position to resume from.
        batch_size: the samples in a batch of all ranks together.
        is_manual: whether the model has manual optimization. It may step any number of optimizers
            in a batch, so Lightning's count of steps is replaced by the count of batches.
    """
    loops = copy.deepcopy(dict(fit_loop))
    done = position.count_done(batch_size)
    before = position.epoch * position.count_in_epoch(batch_size)
    batches = loops["epoch_loop.batch_progress"]
    epochs = loops["epoch_progress"]
    batches["is_last_batch"] = False
    stepped = before + done if is_manual else position.step
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= _counters(0, 0)
    validation["current"] |= _counters(0, 0)
    if position.is_between_epochs:
        ended_epochs = position.epoch
        if position.samples > 0:
            ended_epochs += 1
        completed = before + done
        batches["current"] |= _counters(0, 0)
        epoch_counters = _counters(ended_epochs, ended_epochs)
    else:
        completed = before + done - 1
        batches["current"] |= _counters(done, done - 1)
        epoch_counters = _counters(position.epoch + 1, position.epoch)
        epoch_counters["processed"] = position.epoch
        stepped -= 1  # Lightning counts the current step again when it resumes.
    batches["total"] |= _counters(before + done, completed)
    epochs["total"] |= epoch_counters
    epochs["current"] |= epoch_counters
    loops["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    return loops


def _counters(started: int, completed: int) -> dict[str, int]:
    """Return Lightning's four counters of a loop, of which only the last may differ."""
    return {"ready": started, "started": started, "processed": started, "completed": completed}
