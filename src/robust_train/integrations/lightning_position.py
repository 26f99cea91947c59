"""The position of a Lightning run in samples, and its loops' counters for any micro-batch.

Lightning counts batches, whatever their size was when the checkpoint was written.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResumePosition:
    """A position between two optimizer steps."""

    epoch: int = 0  # the current one, from 0
    samples: int = (
        0  # samples of this epoch that are done; all of them until the next one begins
    )
    epoch_samples: int = 0  # samples in an epoch; 0 if not known yet
    step: int = 0  # optimizer steps done

    @property
    def is_between_epochs(self) -> bool:
        """No epoch is begun and not done."""
        return self.samples in (0, self.epoch_samples)

    def batches_done(self, micro_batch: int) -> int:
        """Return the batches of this epoch that are done, as if all had ``micro_batch`` samples
        of all ranks together.

        Counted from the epoch's end, so the rest is exactly what the loader will yield.
        """
        left = -(-(self.epoch_samples - self.samples) // micro_batch)
        return self.batches(micro_batch) - left

    def batches(self, micro_batch: int) -> int:
        """Return the batches in a whole epoch."""
        return -(-self.epoch_samples // micro_batch)


def loops_at(
    fit_loop: Any,
    position: ResumePosition,
    micro_batch: int,
    *,
    is_manual: bool = False,
) -> Any:
    """Return ``checkpoint["loops"]["fit_loop"]`` as if all batches had ``micro_batch`` samples.

    Two of Lightning's many restart states are enough: at the end of a batch within an epoch, and
    between two epochs (see ``_TrainingEpochLoop.update_restart_stage`` and
    ``_FitLoop.update_restart_stage``).
    """
    loops = copy.deepcopy(dict(fit_loop))
    done = position.batches_done(micro_batch)
    before = position.epoch * position.batches(micro_batch)
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    batches["is_last_batch"] = False
    stepped = (
        before + done if is_manual else position.step
    )  # of any number of optimizers
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= _counters(0, 0)
    validation["current"] |= _counters(0, 0)
    if position.is_between_epochs:
        ended = position.epoch + (position.samples > 0)
        batches["total"] |= _counters(before + done, before + done)
        batches["current"] |= _counters(0, 0)
        counters = _counters(ended, ended)
    else:
        batches["total"] |= _counters(before + done, before + done - 1)
        batches["current"] |= _counters(done, done - 1)
        counters = _counters(position.epoch + 1, position.epoch) | {
            "processed": position.epoch
        }
        stepped -= 1  # it counts this step again on resume
    epochs["total"] |= counters
    epochs["current"] |= counters
    loops["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    return loops


def _counters(begun: int, completed: int) -> dict[str, int]:
    return {
        "ready": begun,
        "started": begun,
        "processed": begun,
        "completed": completed,
    }
