"""Advice to make a job faster, from the figures of an attempt. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from robust_train.model.spec import Speed
from robust_train.readable import number, percent

_MUCH_WAITING = 0.2
_MUCH_SLOWER = 1.2
_LEAST_SECONDS = 10.0
"""Advice that would save less than this is not given."""


def advice_of(speed: Sequence[Speed], num_workers: int | None) -> tuple[str, ...]:
    """Return a sentence for each thing that slowed an attempt down; ``speed`` is of each rank."""
    return (*_data(speed, num_workers), *_slow_ranks(speed))


def text_of(speed: Sequence[Speed], ranks: int) -> str | None:
    """Return the figures of all ranks in short, None without any. Ranks share a step alike, and of
    a script's only the first reports."""
    if not speed:
        return None
    slowest = max(speed, key=lambda one: one.seconds_per_step)
    rates = [
        one.samples_per_second for one in speed if one.samples_per_second is not None
    ]
    shares = [one.data_share for one in speed if one.data_share is not None]
    parts = (
        [f"{number(sum(rates) * ranks / len(speed))} samples/s while training"]
        if len(rates) == len(speed)
        else []
    )
    parts.append(
        f"{number(slowest.seconds_per_step)} s a step "
        f"(median; 95 %: {number(slowest.seconds_per_step_p95)} s)"
    )
    return ", ".join(
        [*parts, *([f"{percent(max(shares))} waiting for data"] if shares else [])]
    )


def _data(speed: Sequence[Speed], num_workers: int | None) -> Iterator[str]:
    if not speed:
        return
    worst = max(speed, key=lambda one: one.data_share or 0)
    share = worst.data_share or 0
    if (
        share <= _MUCH_WAITING
        or share * worst.steps * worst.seconds_per_step < _LEAST_SECONDS
    ):
        return
    who = "training" if len(speed) == 1 else f"rank {worst.rank}"
    workers = "" if num_workers is None else f" (now {num_workers})"
    yield (
        f"{who} waited for data {percent(share)} of the time: raise "
        f"training.num_workers{workers}, or move the data to a faster disk"
    )


def _slow_ranks(speed: Sequence[Speed]) -> Iterator[str]:
    alone = {
        s.rank: s.seconds_alone_per_step for s in speed if s.seconds_alone_per_step
    }
    if len(alone) < 2:
        return
    slow = max(alone, key=lambda rank: alone[rank])
    usual = statistics.median(
        seconds for rank, seconds in alone.items() if rank != slow
    )
    lost = (alone[slow] - usual) * min(one.steps for one in speed)
    if alone[slow] > _MUCH_SLOWER * usual and lost >= _LEAST_SECONDS:
        yield (
            f"rank {slow} is slow: {number(alone[slow])} s a step until the ranks meet, the others "
            f"{number(usual)} s; robust-train gpus shows the other processes on its GPU"
        )
