"""The position of a Lightning run in samples, and its loops' counters for any micro-batch.

Lightning counts batches, whatever their size was when the checkpoint was written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResumePosition:
    """A position between two optimizer steps.

    Attributes:
        epoch: the current one, from 0.
        samples: samples of this epoch that are done; all of them until the next one begins.
        epoch_samples: samples in an epoch; 0 if not known yet.
        step: optimizer steps done.
    """

    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    step: int = 0

    def batches_done(self, micro_batch: int) -> int:
        """Return the batches of this epoch that are done, as if all had ``micro_batch`` samples.

        Counted from the epoch's end, so the rest is exactly what the loader will yield.
        """
        left = -(-(self.epoch_samples - self.samples) // micro_batch)
        return self.batches(micro_batch) - left

    def batches(self, micro_batch: int) -> int:
        """Return the batches in a whole epoch."""
        return -(-self.epoch_samples // micro_batch)


def share_of_step(
    samples: int, *, group: int, micro_batch: int, accumulation: int, left: int
) -> float:
    """Return the factor for a micro-batch's mean loss after Lightning divided it.

    It is 1 except in a step that is short or uneven, as an epoch's last one may be.

    Args:
        samples: samples in this micro-batch.
        group: micro-batches in this step, if the epoch has enough samples.
        micro_batch: samples in a full micro-batch.
        accumulation: Lightning's divisor.
        left: samples of the epoch that are left when the step begins.
    """
    return accumulation * samples / min(group * micro_batch, left)


def loops_at(
    fit_loop: Mapping[str, Any], position: ResumePosition, micro_batch: int
) -> dict[str, Any]:
    """Return the fit loop's part of a checkpoint as if all batches had had ``micro_batch``.

    Two of Lightning's many restart states are enough: at the end of a batch within an epoch, and
    between two epochs (see ``_TrainingEpochLoop.update_restart_stage`` and
    ``_FitLoop.update_restart_stage``).

    Args:
        fit_loop: ``checkpoint["loops"]["fit_loop"]``; it is not changed.
        position: where to resume.
        micro_batch: samples in a batch from now on.
    """
    loops = copy.deepcopy(dict(fit_loop))
    done = position.batches_done(micro_batch)
    before = position.epoch * position.batches(micro_batch)
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    batches["is_last_batch"] = False
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= _counters(0)
    validation["current"] |= _counters(0)
    if 0 < position.samples < position.epoch_samples:
        batches["total"] |= _counters(before + done, completed=before + done - 1)
        batches["current"] |= _counters(done, completed=done - 1)
        begun = {"ready": position.epoch + 1, "started": position.epoch + 1}
        ended = {"processed": position.epoch, "completed": position.epoch}
        epochs["total"] |= begun | ended
        epochs["current"] |= begun | ended
        stepped = position.step - 1  # it counts this step again on resume
    else:
        ended_epochs = position.epoch + (position.samples > 0)
        batches["total"] |= _counters(before + done)
        batches["current"] |= _counters(0)
        epochs["total"] |= _counters(ended_epochs)
        epochs["current"] |= _counters(ended_epochs)
        stepped = position.step
    loops["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    return loops


def _counters(count: int, *, completed: int | None = None) -> dict[str, int]:
    return {
        "ready": count,
        "started": count,
        "processed": count,
        "completed": count if completed is None else completed,
    }
