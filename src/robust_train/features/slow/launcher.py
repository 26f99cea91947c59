"""Watches how fast an attempt trains, from the launcher, and logs once what costs more than a fifth
of the time for ten minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from robust_train.config.attempt import AttemptRequest
from robust_train.features.slow.model import MUCH, hindrances, lost_share
from robust_train.features.slow.record import Slow
from robust_train.gpu.inventory import close_session, read_inventory
from robust_train.gpu.processes import CudaProcess, list_cuda_processes
from robust_train.host.linux import list_children
from robust_train.launcher.hooks import InLauncher, JobView, Pause
from robust_train.model.attempt import Attempt
from robust_train.model.events import Event, MicroBatchChanged, SpeedMeasured
from robust_train.model.gpu import GpuInfo, Group
from robust_train.model.spec import Speed

log = logging.getLogger("robust_train")

LONG_SECONDS = 600.0
_POLL_SECONDS = 30.0
_LEAST_STEPS = 20  # the first steps are slow for other reasons


class SlowTraining(InLauncher):
    """Logs and records the causes that slow each attempt down. A trainer in this process is not
    watched."""

    def __init__(self, job: JobView) -> None:
        super().__init__(job)
        self._watch: SlowWatch | None = None

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Watch the next attempt."""
        if not self.job.plan.config.runs_inline:
            self._watch = SlowWatch(attempt.spec.gpus, self._record)
        return request

    def event(self, event: Event, attempt: Attempt | None) -> None:
        """Receive the attempt's speed."""
        if self._watch is not None:
            self._watch.on_event(event)

    def tick(self, attempt: Attempt | None) -> Pause | None:
        """Look for expensive causes."""
        if self._watch is not None and attempt is not None:
            self._watch.poll()
        return None

    def _record(self, event: Slow) -> None:
        if event.text:
            log.warning("%s, over the last ten minutes", event.text)
        else:
            log.info("training is no longer slowed down")
        self.job.record(event)


class SlowWatch:
    """Watches an attempt on these GPUs, and passes `Slow` events to ``on_event``."""

    def __init__(
        self,
        gpus: Group,
        on_event: Callable[[Slow], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._on_event = on_event
        self._now = now
        self._speed: dict[int, Speed] = {}
        self._best = 0.0
        self._measured_at = self._next_poll = now()
        self._since: dict[str, float] = {}
        self._sent = ""
        self._is_seen = not gpus  # whether its GPUs are known

    def on_event(self, event: Event) -> None:
        """Receive an event of the attempt."""
        match event:
            case SpeedMeasured(speed=speed) if speed.steps >= _LEAST_STEPS:
                self._speed[event.rank] = replace(speed, rank=event.rank)
                self._measured_at = self._now()
                pace = speed.seconds_per_step_now
                if pace:
                    self._best = min(pace, self._best or pace)
            case MicroBatchChanged(training=True):
                self._speed.clear()
                self._best = 0.0

    def poll(self) -> None:
        """Look for hindrances twice a minute, and send the worst if it changed."""
        now = self._now()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        if not self._is_seen:
            self._warn_if_elsewhere()
        speeds = list(self._speed.values())
        longest = max((3 * speed.seconds_per_step for speed in speeds), default=0.0)
        if now - self._measured_at > max(2 * _POLL_SECONDS, longest):
            speeds = []  # nothing is measured, for example during a validation
        is_slow = lost_share(speeds, self._best) > MUCH
        on_gpu = _on_gpus(self._gpus) if is_slow and self._gpus else {}
        present = hindrances(speeds, self._best, on_gpu)
        self._since = {what: self._since.get(what, now) for what in present}
        lasting = [what for what in present if now - self._since[what] >= LONG_SECONDS]
        worst = max(
            [present[what] for what in lasting], key=lambda slow: slow.share, default=Slow()
        )
        if worst.what != self._sent:
            self._sent = worst.what
            self._on_event(replace(worst, share=round(worst.share, 3)))

    def _warn_if_elsewhere(self) -> None:
        here, ours, _ = _computing(self._gpus)
        self._is_seen = bool(ours)
        on = {index for process in ours for index in process.gpus}
        elsewhere = sorted(on - here.keys())
        if elsewhere:
            log.warning(
                "the trainer computes on GPU %s, which is not reserved for it: it sets "
                "CUDA_VISIBLE_DEVICES itself, and should use the GPU that it is given",
                ", ".join(map(str, elsewhere)),
            )


def _on_gpus(gpus: Group) -> dict[str, str]:
    """Describe what hinders these GPUs now: heat or power, or processes of others."""
    here, ours, others = _computing(gpus)
    reasons = {
        f"GPU {index}": f"GPU {index} is throttled ({gpu.throttled})"
        for index, gpu in here.items()
        if gpu.throttled
    }
    # If no process here is ours, it is unknown which numbers are the job's.
    for process in others if ours else ():
        shared = [index for index in process.gpus if index in here]
        if shared:
            who = f"process {process.pid} of {process.user} computes on GPU {shared[0]} too"
            reasons[f"process {process.pid}"] = who
    return reasons


def _computing(gpus: Group) -> tuple[dict[int, GpuInfo], list[CudaProcess], list[CudaProcess]]:
    """Return the current state of these GPUs, and the processes on any GPU: this job's, and
    others."""
    inventory = read_inventory()
    close_session()  # an open session blocks a reset of any GPU
    uuids = {gpu.uuid for gpu in gpus}
    here = {gpu.index: gpu for gpu in inventory.gpus if gpu.uuid in uuids}
    pids = {child.pid for child in list_children(recursive=True)}
    listed, _ = list_cuda_processes(inventory)
    ours = [process for process in listed if process.pid in pids]
    return here, ours, [process for process in listed if process not in ours]
