"""Watches the speed of an attempt in the launcher, and warns of a cause that slows training down.

Such a cause is a slow data loader, a slow rank, a throttled GPU, or another process on the GPU. A
cause that costs more than a fifth of the time for ten minutes is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from robust_train.config.attempt import AttemptRequest
from robust_train.features.slow.model import MUCH, find_causes, lost_share
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

LONG_SECONDS = 600.0  # a cause that has lasted this long is logged
_POLL_SECONDS = 30.0
_LEAST_STEPS = 20  # a speed over fewer steps does not count, because the first steps are slow


class SlowTraining(InLauncher):
    """Logs and records the causes that slow attempts down. A trainer in the launcher's own process
    is not watched."""

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
        """Look for causes that cost a lot of time."""
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
    """Watches an attempt, and sends a `Slow` event when the worst cause changes."""

    def __init__(
        self,
        gpus: Group,  # the attempt's GPUs
        send: Callable[[Slow], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._send = send
        self._now = now
        self._speed: dict[int, Speed] = {}  # the last speed of each rank
        self._best = 0.0  # the fewest seconds per step so far, 0 if unknown
        self._measured_at = now()
        self._next_poll = now()
        self._since: dict[str, float] = {}  # when each present cause began, by its name
        self._sent = ""  # the name of the cause in the last event, empty if it had none
        # Whether a process of the attempt was seen on a GPU, or the attempt has no GPU.
        self._is_on_gpu = not gpus

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
        """Look for causes twice a minute, and send the worst if it changed."""
        now = self._now()
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL_SECONDS
        if not self._is_on_gpu:
            self._warn_of_unreserved_gpus()
        present = self._find_causes(now)
        self._since = {name: self._since.get(name, now) for name in present}
        # An event without a cause reports that training is no longer slow.
        worst = Slow()
        for name, cause in present.items():
            has_lasted = now - self._since[name] >= LONG_SECONDS
            if has_lasted and cause.share > worst.share:
                worst = cause
        if worst.what != self._sent:
            self._sent = worst.what
            self._send(replace(worst, share=round(worst.share, 3)))

    def _find_causes(self, now: float) -> dict[str, Slow]:
        """Return the current causes that cost a lot of time, by name."""
        speeds = list(self._speed.values())
        longest = max((3 * speed.seconds_per_step for speed in speeds), default=0.0)
        if now - self._measured_at > max(2 * _POLL_SECONDS, longest):
            speeds = []  # No steps are measured now, for example during a validation.
        on_gpu: dict[str, str] = {}
        # Queries of the driver cost time, so they are made only if training is slow.
        if self._gpus and lost_share(speeds, self._best) > MUCH:
            on_gpu = _describe_gpu_problems(self._gpus)
        return find_causes(speeds, self._best, on_gpu)

    def _warn_of_unreserved_gpus(self) -> None:
        """Warn if the attempt computes on a GPU that is not reserved for it.

        The check is repeated until the attempt's processes are on a GPU, so it warns only once.
        """
        use = _read_use(self._gpus)
        self._is_on_gpu = bool(use.ours)
        indices = {index for process in use.ours for index in process.gpus}
        unreserved = sorted(indices - use.gpus.keys())
        if unreserved:
            log.warning(
                "the trainer computes on GPU %s, which is not reserved for it: it sets "
                "CUDA_VISIBLE_DEVICES itself, and should use the GPU that it is given",
                ", ".join(map(str, unreserved)),
            )


def _describe_gpu_problems(gpus: Group) -> dict[str, str]:
    """Return a text for each current problem of these GPUs, by name: throttling by heat or power,
    or a process of another job or user."""
    use = _read_use(gpus)
    problems: dict[str, str] = {}
    for index, gpu in use.gpus.items():
        if gpu.throttled:
            problems[f"GPU {index}"] = f"GPU {index} is throttled ({gpu.throttled})"
    if not use.ours:
        # The driver's process ids cannot be matched with this job's, for example in a container.
        return problems
    for process in use.others:
        shared = [index for index in process.gpus if index in use.gpus]
        if shared:
            text = f"process {process.pid} of {process.user} computes on GPU {shared[0]} too"
            problems[f"process {process.pid}"] = text
    return problems


@dataclass(frozen=True)
class _GpuUse:
    """The state of a job's GPUs, and the processes on any GPU of the machine."""

    gpus: dict[int, GpuInfo]  # the job's GPUs by index
    ours: list[CudaProcess]  # processes of this job
    others: list[CudaProcess]  # all other processes


def _read_use(gpus: Group) -> _GpuUse:
    """Read the current use of these GPUs from the driver."""
    inventory = read_inventory()
    close_session()  # An open session blocks a reset of any GPU.
    uuids = {gpu.uuid for gpu in gpus}
    pids = {child.pid for child in list_children(recursive=True)}
    processes, _ = list_cuda_processes(inventory)
    return _GpuUse(
        gpus={gpu.index: gpu for gpu in inventory.gpus if gpu.uuid in uuids},
        ours=[process for process in processes if process.pid in pids],
        others=[process for process in processes if process.pid not in pids],
    )
