"""Whether an attempt is slow while it trains, and why, as far as that is measured.

The rule is pure: :func:`hindrances`. A cause that costs more than a fifth of the time for ten
minutes is named once, until it is over.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from robust_train.gpu.inventory import close_session, read_inventory
from robust_train.gpu.processes import list_cuda_processes
from robust_train.model.events import Event, MicroBatchChanged, Slow, SpeedMeasured
from robust_train.model.gpu import Group
from robust_train.model.spec import Speed
from robust_train.readable import number, percent

MUCH = 0.2
LONG_SECONDS = 600.0
_POLL_SECONDS = 30.0
_LEAST_STEPS = 20  # the first ones are slow in their own way


@dataclass(frozen=True)
class Hindrance:
    """What slows an attempt down, and which share of its time that costs."""

    what: str
    share: float
    text: str


def hindrances(
    speed: Mapping[int, Speed],  # of each rank, lately
    best: float
    | None,  # seconds a step, of the job's fastest half minute with this micro-batch
    on_gpu: Mapping[str, str],  # what hinders the GPUs just now, by kind
) -> dict[str, Hindrance]:
    """Return what costs much, by its kind. What was not measured is no cause."""
    found = []
    if speed:
        worst = max(speed.values(), key=lambda one: one.data_share or 0)
        share = worst.data_share or 0
        text = f"training waits for data {percent(share)} of the time"
        found.append(Hindrance("data", share, text))
    alone = {
        rank: one.seconds_alone_per_step
        for rank, one in speed.items()
        if one.seconds_alone_per_step
    }
    if len(alone) > 1:
        slow = max(alone, key=lambda rank: alone[rank])
        most = alone.pop(slow)
        usual = statistics.median(alone.values())
        text = (
            f"rank {slow} takes {number(most)} s a step, the others {number(usual)} s"
        )
        found.append(Hindrance(f"rank {slow}", 1 - usual / most, text))
    share = lost_share(speed, best)
    for what, text in on_gpu.items():
        found.append(
            Hindrance(
                what, share, f"{text}, and {percent(share)} of a step's time is lost"
            )
        )
    return {one.what: one for one in found if one.share > MUCH}


def lost_share(speed: Mapping[int, Speed], best: float | None) -> float:
    """Return which share of a step's time the fastest steps did without."""
    now = [one.seconds_per_step_now for one in speed.values()]
    known = [seconds for seconds in now if seconds]
    return 1 - best / max(known) if best and known else 0.0


class SlowWatch:
    """Watches one attempt on these GPUs; ``on_event`` takes :class:`Slow`."""

    def __init__(
        self,
        gpus: Group,
        on_event: Callable[[Event], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus, self._on_event, self._now = gpus, on_event, now
        self._speed: dict[int, Speed] = {}
        self._best: float | None = None
        self._measured_at = self._next_poll = now()
        self._since: dict[str, float] = {}
        self._told = ""

    def on_event(self, event: Event) -> None:
        """Take an event of the attempt."""
        match event:
            case SpeedMeasured(speed=speed) if speed.steps >= _LEAST_STEPS:
                self._speed[event.rank] = speed
                self._measured_at = self._now()
                if pace := speed.seconds_per_step_now:
                    self._best = min(pace, self._best or pace)
            case MicroBatchChanged(training=True):
                self._speed.clear()
                self._best = None

    def poll(self) -> None:
        """Look for what costs much, twice a minute; send what has done so for long, or no more."""
        now = self._now()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        steps = [one.seconds_per_step for one in self._speed.values()]
        silence = now - self._measured_at
        # a validation, perhaps: nothing is measured
        is_old = silence > max(2 * _POLL_SECONDS, *(3 * one for one in steps), 0.0)
        on_gpu: dict[str, str] = {}
        if not is_old and lost_share(self._speed, self._best) > MUCH:
            on_gpu = _on_gpus(self._gpus)
        found = {} if is_old else hindrances(self._speed, self._best, on_gpu)
        self._since = {what: self._since.get(what, now) for what in found}
        long = [
            one
            for what, one in found.items()
            if now - self._since[what] >= LONG_SECONDS
        ]
        worst = max(long, key=lambda one: one.share, default=None)
        if (worst.what if worst else "") != self._told:
            self._told = worst.what if worst else ""
            text, share = (worst.text, worst.share) if worst else ("", 0.0)
            self._on_event(Slow(self._told, text, round(share, 3)))


def _on_gpus(gpus: Group) -> dict[str, str]:
    """Return what hinders these GPUs now: heat or power, or processes that are not the job's."""
    uuids = {gpu.uuid for gpu in gpus}
    if not uuids:
        return {}
    inventory = read_inventory()
    close_session()  # an open one blocks a reset of any GPU
    here = {gpu.index: gpu for gpu in inventory.gpus if gpu.uuid in uuids}
    found = {
        f"GPU {index}": f"GPU {index} is throttled ({gpu.throttled})"
        for index, gpu in here.items()
        if gpu.throttled
    }
    own = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    listed = list_cuda_processes(inventory).processes
    if not own & {process.pid for process in listed}:
        return found  # which numbers are the job's is not known
    for process in listed:
        shared = [index for index in process.gpus if index in here]
        if shared and process.pid not in own:
            who = f"process {process.pid} of {process.user} computes on GPU {shared[0]} too"
            found[f"process {process.pid}"] = who
    return found
