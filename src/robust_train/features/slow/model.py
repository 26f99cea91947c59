"""Finds the measured causes of slow training. Pure, called by ``slow.launcher``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from robust_train.features.slow.record import Slow
from robust_train.model.spec import Speed, find_slowest_rank
from robust_train.readable import number, percent

MUCH = 0.2
"""A cause that costs a smaller share of the time is not logged."""


def find_causes(
    speeds: Collection[Speed],  # the latest speed of each rank
    # Seconds per step in the attempt's fastest half minute with this micro-batch, 0 if unknown.
    best: float,
    on_gpu: Mapping[str, str],  # the present problems of the GPUs, by their names
) -> dict[str, Slow]:
    """Return the causes that cost much time, by their names."""
    waited = max((speed.data_share or 0 for speed in speeds), default=0)
    causes = [Slow("data", f"training waits for data {percent(waited)} of the time", waited)]
    slowest = find_slowest_rank(speeds)
    if slowest is not None:
        rank, most, usual = slowest
        text = f"rank {rank} takes {number(most)} s a step, the others {number(usual)} s"
        causes.append(Slow(f"rank {rank}", text, 1 - usual / most))
    lost = lost_share(speeds, best)
    for what, problem in on_gpu.items():
        text = f"{problem}, and {percent(lost)} of a step's time is lost"
        causes.append(Slow(what, text, lost))
    return {cause.what: cause for cause in causes if cause.share > MUCH}


def lost_share(speeds: Collection[Speed], best: float) -> float:
    """Return the share of a step's time that the fastest steps did not need."""
    now = max((speed.seconds_per_step_now or 0.0 for speed in speeds), default=0.0)
    if not best or not now:
        return 0.0
    return 1 - best / now
