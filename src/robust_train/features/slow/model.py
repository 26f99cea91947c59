"""Whether training is slow, and why, as far as that is measured. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from robust_train.features.slow.record import Slow
from robust_train.model.spec import Speed, find_slowest_rank
from robust_train.readable import number, percent

MUCH = 0.2
"""A share of the time. A hindrance that costs less is not worth a line."""


def hindrances(
    speeds: Collection[Speed],  # the latest speed of each rank
    # Seconds a step in the job's fastest half minute with this micro-batch, or 0 if unknown.
    best: float,
    on_gpu: Mapping[str, str],  # present hindrances of the GPUs, by kind
) -> dict[str, Slow]:
    """Return the hindrances that cost much, by kind. Only measured causes count."""
    waited = max((speed.data_share or 0 for speed in speeds), default=0)
    text = f"training waits for data {percent(waited)} of the time"
    reasons = [Slow("data", text, waited)]
    slowest = find_slowest_rank(speeds)
    if slowest is not None:
        rank, most, usual = slowest
        text = f"rank {rank} takes {number(most)} s a step, the others {number(usual)} s"
        reasons.append(Slow(f"rank {rank}", text, 1 - usual / most))
    lost = lost_share(speeds, best)
    how = f", and {percent(lost)} of a step's time is lost"
    reasons += [Slow(what, text + how, lost) for what, text in on_gpu.items()]
    return {reason.what: reason for reason in reasons if reason.share > MUCH}


def lost_share(speeds: Collection[Speed], best: float) -> float:
    """Return the share of a step's time that the fastest steps did not need."""
    now = max((speed.seconds_per_step_now or 0.0 for speed in speeds), default=0.0)
    return 1 - best / now if best and now else 0.0
