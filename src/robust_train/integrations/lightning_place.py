"""Where a Lightning run is, counted in samples, and its loops' counters for any micro-batch.

Lightning counts batches and gives no thought to what a batch was when the checkpoint was written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A place between two optimizer steps.

    Attributes:
        epoch: the current one, from 0.
        samples: of this epoch that are behind; all of them until the next one begins.
        epoch_samples: in an epoch; 0 where that is not known yet.
        step: optimizer steps done.
    """

    epoch: int = 0
    samples: int = 0
    epoch_samples: int = 0
    step: int = 0

    def batches_behind(self, micro_batch: int) -> int:
        """Batches of this epoch that are behind, had all been of ``micro_batch`` samples.

        Counted from the epoch's end, so that what is left is exactly what the loader will give.
        """
        left = -(-(self.epoch_samples - self.samples) // micro_batch)
        return self.batches(micro_batch) - left

    def batches(self, micro_batch: int) -> int:
        """Batches in a whole epoch."""
        return -(-self.epoch_samples // micro_batch)


def share_of_step(
    samples: int, *, group: int, micro_batch: int, accumulation: int, left: int
) -> float:
    """By how much a micro-batch's mean loss is to be multiplied, once Lightning has divided it by
    the accumulation: 1, but in a step that is short or uneven, as an epoch's last one may be.

    Args:
        samples: in this micro-batch.
        group: micro-batches in this step, if the epoch lasts.
        micro_batch: samples in a full one.
        accumulation: what Lightning divides by.
        left: samples of the epoch that are left when the step begins.
    """
    return accumulation * samples / min(group * micro_batch, left)


def loops_at(fit_loop: Mapping[str, Any], place: Place, micro_batch: int) -> dict[str, Any]:
    """The fit loop's part of a Lightning checkpoint, as if all batches had had ``micro_batch``.

    Two of the many states that Lightning may save itself in are enough: at the end of a batch
    within an epoch, and between two epochs (see ``_TrainingEpochLoop.update_restart_stage`` and
    ``_FitLoop.update_restart_stage``).

    Args:
        fit_loop: ``checkpoint["loops"]["fit_loop"]``; it is not changed.
        place: where to go on.
        micro_batch: samples in a batch from now on.
    """
    loops = copy.deepcopy(dict(fit_loop))
    behind = place.batches_behind(micro_batch)
    before = place.epoch * place.batches(micro_batch)
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    batches["is_last_batch"] = False
    validation = loops["epoch_loop.val_loop.batch_progress"]
    validation["total"] |= _counters(0)
    validation["current"] |= _counters(0)
    if 0 < place.samples < place.epoch_samples:
        batches["total"] |= _counters(before + behind, completed=before + behind - 1)
        batches["current"] |= _counters(behind, completed=behind - 1)
        begun = {"ready": place.epoch + 1, "started": place.epoch + 1}
        ended = {"processed": place.epoch, "completed": place.epoch}
        epochs["total"] |= begun | ended
        epochs["current"] |= begun | ended
        stepped = place.step - 1  # it counts this one when it goes on
    else:
        done = place.epoch + (place.samples > 0)
        batches["total"] |= _counters(before + behind)
        batches["current"] |= _counters(0)
        epochs["total"] |= _counters(done)
        epochs["current"] |= _counters(done)
        stepped = place.step
    loops["epoch_loop.state_dict"] = {"_batches_that_stepped": stepped}
    return loops


def _counters(count: int, *, completed: int | None = None) -> dict[str, int]:
    return {
        "ready": count,
        "started": count,
        "processed": count,
        "completed": count if completed is None else completed,
    }
