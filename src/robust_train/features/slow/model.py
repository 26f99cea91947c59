"""Whether training is slow, and why, as far as that is measured. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from robust_train.model.events import Slow
from robust_train.model.spec import Speed, slowest_rank
from robust_train.readable import number, percent

MUCH = 0.2
"""Of the time: what costs less is not worth a line."""


def hindrances(
    speeds: Collection[Speed],  # of each rank, lately
    # seconds a step, of the job's fastest half minute with this micro-batch; 0 if unknown
    best: float,
    on_gpu: Mapping[str, str],  # what hinders the GPUs just now, by kind
) -> dict[str, Slow]:
    """Return what costs much, by its kind. What was not measured is no cause."""
    waited = max((one.data_share or 0 for one in speeds), default=0)
    text = f"training waits for data {percent(waited)} of the time"
    found = [Slow("data", text, waited)]
    if (slowest := slowest_rank(speeds)) is not None:
        rank, most, usual = slowest
        text = f"rank {rank} takes {number(most)} s a step, the others {number(usual)} s"
        found.append(Slow(f"rank {rank}", text, 1 - usual / most))
    lost = lost_share(speeds, best)
    how = f", and {percent(lost)} of a step's time is lost"
    found += [Slow(what, text + how, lost) for what, text in on_gpu.items()]
    return {one.what: one for one in found if one.share > MUCH}


def lost_share(speeds: Collection[Speed], best: float) -> float:
    """Return which share of a step's time the fastest steps did without."""
    now = max((one.seconds_per_step_now or 0.0 for one in speeds), default=0.0)
    return 1 - best / now if best and now else 0.0
