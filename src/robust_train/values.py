"""The frozen values that everything else is written in. No imports from the package, no effects.

Memory is in bytes and time in seconds throughout; only configuration keys and log lines use other
units, and then say so in their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

MIB = 1024**2
GIB = 1024**3

UNDER_SUBMITIT = "SUBMITIT_EXECUTOR"
"""Set in the environment of submitit's jobs, where SIGTERM comes with every preemption."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that NVML lists on a GPU."""

    pid: int  # process id as the driver sees it, which a container may number differently
    used_bytes: int | None = None  # memory it holds, None if unavailable
    computes: bool = True  # NVML lists it as a CUDA process; False for one that only draws


@dataclass(frozen=True)
class GpuInfo:
    """One GPU (or one MIG slice) at one moment."""

    uuid: str  # the device's identity, `GPU-…` or `MIG-…`; indices are never an identity
    name: str  # product name
    index: int  # NVML's number of the GPU (of the parent GPU for a slice), as `nvidia-smi` shows it
    pci_bus_id: str  # `domain:bus:device.function` in lower-case hexadecimal
    total_bytes: int  # memory of the device
    free_bytes: int  # free_bytes, used_bytes: as NVML has them; never computed as a difference
    used_bytes: int
    utilization_percent: int | None = None  # how busy the GPU was lately, None where not supported
    # `default`, `exclusive_process`, `exclusive_thread` or `prohibited`
    compute_mode: str = "default"
    # who is on it; None if unavailable or not asked for
    processes: tuple[GpuProcess, ...] | None = None
    parent_uuid: str | None = None  # for a MIG slice the UUID of the GPU it is a part of
    # the GPU shares the host's memory (integrated); the figures are the host's
    unified_memory: bool = False
    unusable: str | None = None  # why no job may start on it now, or None
    # NVIDIA's Multi-Process Service owns it, so that exclusive mode is no obstacle
    mps: bool = False
    # CUDA's number of it under `CUDA_DEVICE_ORDER=PCI_BUS_ID` with no mask; None where NVML's and
    # CUDA's lists may differ
    cuda_index: int | None = None


Group = tuple[GpuInfo, ...]
"""The GPUs that an attempt has together, one for each rank; empty for the CPU."""


@dataclass(frozen=True)
class SkippedGpu:
    """A GPU that could not be read: its NVML index, its UUID where known, and why."""

    index: int
    reason: str
    uuid: str | None = None


@dataclass(frozen=True)
class Inventory:
    """All GPUs of the machine at one moment."""

    # those that answered, MIG slices in place of their parent, ordered by PCI address
    gpus: tuple[GpuInfo, ...] = ()
    skipped: tuple[SkippedGpu, ...] = ()  # those that did not, with reasons
    # a sentence where there is nothing to list (library missing, driver and library differ, no
    # GPUs), else None
    problem: str | None = None
    driver_version: str | None = None  # of the NVIDIA driver, None where unknown
    answered: bool = True  # False where the driver hangs, so that nothing is known of the GPUs
    may_have_gpus: bool = True  # False without any driver, and where it lists no GPU


class FailureKind(str, Enum):
    """What ended an attempt that did not complete."""

    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    WORKER_DEATH = "worker_death"
    DEVICE_FAULT = "device_fault"
    DEVICE_UNAVAILABLE = "device_unavailable"
    COMM = "comm"
    INTERRUPTED = "interrupted"
    BUG = "bug"

    @property
    def is_memory(self) -> bool:
        """Whether memory ran out."""
        return self in MEMORY_FAILURES


MEMORY_FAILURES = frozenset({FailureKind.DEVICE_OOM, FailureKind.HOST_OOM})


@dataclass(frozen=True)
class Evidence:
    """What is known about a failure, in bytes; None if unavailable."""

    requested_bytes: int | None = None  # the allocation that failed
    allocated_bytes: int | None = None  # held by live tensors
    reserved_unallocated_bytes: int | None = None  # held by the caching allocator but unused
    free_bytes: int | None = None  # free on the device at that moment
    total_bytes: int | None = None  # size of the device
    allowed_bytes: int | None = None  # what `memory.fraction` lets this process have of it
    fragmented: bool = False  # the allocator held at least as much unused memory as was asked for
    # the process reached its own limit while the device had enough free memory
    own_limit: bool = False
    clue: str | None = None  # what message or stack show beyond the kind, one of Clue
    library: str | None = None  # who raised (`torch`, `cublas`, `cudnn`, `numpy`, `kernel` …)
    no_workers: bool = False  # the trainer has read no number of data-loader workers


class Clue:
    """Values of :attr:`Evidence.clue`; plain strings, so that they travel as JSON."""

    HARDWARE = "hardware"  # The GPU itself is at fault: ECC, NVLink, a lost device
    BUSY = "busy"  # The device refused a context for now
    DRIVER = "driver"
    """The driver refused a call, as it does where it lacks virtual memory management."""
    IMPORT = "import"  # Memory ran out while a module was imported
    MODEL = "model"  # Memory ran out while a model was made, loaded or moved to the device
    SHARED_MEMORY = "shared_memory"  # `/dev/shm` is too small
    DOWNLOAD = "download"  # Data or weights could not be fetched
    KILLED = "killed"  # SIGKILL, from neither the launcher nor the kernel's OOM killer
    STALLED = "stalled"  # No sign of life, or no progress, for too long
    USER_ERROR = "user_error"  # A mistake of the user's that the trainer names in a line
    UNCLEAR = "unclear"  # The message has other causes too, but memory had nearly run out


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: its kind, one line of message, the evidence and ordered advice.

    ``rank`` is that of the process in which it began, None where there was one or it is not known.
    """

    kind: FailureKind
    message: str
    evidence: Evidence = field(default_factory=Evidence)
    advice: tuple[str, ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class AttemptSpec:
    """What one attempt is to use."""

    gpus: Group  # the GPUs, that of rank 0 first; empty for the CPU
    batch_size: int  # micro-batch, samples in one forward and backward pass of one rank
    gradient_accumulation_steps: int  # micro-batches of each rank per optimizer step
    ranks: int = 1  # processes that share an optimizer step; one for each GPU
    num_workers: int = 0  # data-loader workers of each rank
    prefetch_factor: int = 2  # batches that each worker prepares ahead
    expandable_segments: bool = True  # the CUDA allocator's setting against fragmentation
    has_batch: bool = True  # False for a script that is given no batch size; it is 1 then
    gradient_checkpointing: bool = False  # activations are recomputed in the backward pass

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps * self.ranks

    @property
    def gpu(self) -> GpuInfo | None:
        """The GPU of rank 0, None for the CPU."""
        return self.gpus[0] if self.gpus else None

    @property
    def device(self) -> str:
        """The device's name for people: ``cuda:<NVML index>``, with commas, or ``cpu``."""
        return device_name(self.gpus)

    @property
    def device_key(self) -> str:
        """The device's identity, whatever the order of the GPUs: their UUIDs, or ``cpu``."""
        return ",".join(sorted(gpu.uuid for gpu in self.gpus)) or "cpu"


def gpus_of(group: Group, rank: int | None) -> Group:
    """Return the GPU of ``rank``; all of them where it is not known which is meant."""
    return group if rank is None else group[rank : rank + 1]


def device_name(gpus: Group) -> str:
    """Return ``cuda:0,cuda:1`` as ``nvidia-smi`` counts, ``cpu`` where there are none."""
    return ",".join(f"cuda:{gpu.index}" for gpu in gpus) or "cpu"


@dataclass(frozen=True)
class Speed:
    """How fast one rank trained in an attempt; its first step, validation and checkpoints are left
    out. None if unknown."""

    steps: int  # that were measured
    seconds_per_step: float  # median
    seconds_per_step_p95: float  # 95th percentile
    samples_per_second: float | None = None  # of this rank
    data_share: float | None = None  # of the time, waiting for data, from 0 to 1
    seconds_alone_per_step: float | None = None  # mean, until the ranks wait for each other
    rank: int = 0

    def without_samples(self) -> Speed:
        """Return the same speed without samples, for a trainer whose batch is not known."""
        return replace(self, samples_per_second=None)


@dataclass(frozen=True)
class Pace:
    """How many samples a second a job made in all its ranks, and with what."""

    samples_per_second: float
    when: float  # seconds since the epoch
    ranks: int = 1
    batch_size: int | None = None  # micro-batch, samples
    num_workers: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    failure: Failure | None  # None if it completed
    result: Any = None  # what the trainer returned, reduced to JSON's types
    seconds: float = 0.0  # wall time of the attempt
    start_step: int = 0  # optimizer step it started from (0 for a fresh start)
    end_step: int | None = None  # last optimizer step it reported, None if it reported none
    began_training: bool = False  # it reported that training begins, which some trainers never do
    # step of its last checkpoint, None if it has none or no step is known
    saved_step: int | None = None
    saves: int = 0  # how many checkpoints it reported
    checkpoint: str | None = None  # the path of the last one
    peak_memory_bytes: int | None = None  # of the device, or of the process where it ran on the CPU
    # device memory at the end (`allocated`, `reserved`, `max_allocated`), bytes; of several ranks
    # that of the one with the highest peak
    memory: dict[str, int] | None = None
    # by the final clean-up: `of` (`reserved` or `resident` memory), `before_bytes`, `after_bytes`,
    # `returned_bytes`, `seconds`; None without one
    memory_returned: Mapping[str, object] | None = None
    # the one in use at the end where the trainer itself had changed it, else None
    micro_batch: int | None = None
    keeps_batch: str | None = None  # why no attempt may split the batch in another way
    # free memory, before the attempt, of the GPU on which it failed; None where not known
    gpu_free_before_bytes: int | None = None
    gpu_free_after_bytes: int | None = None  # the same when the attempt's process was gone
    # what probes before training have found (the event `batch_size_found`), None without any
    batch_search: Mapping[str, object] | None = None
    # what it was asked to stop for, so that another attempt can go on; else None
    stopped_for: str | None = None
    speed: tuple[Speed, ...] = ()  # of each rank that measured it
    faster_before: Pace | None = None  # the fastest earlier job of this kind on such a GPU
    traceback: str | None = None  # the trainer's own traceback as text, None where there is none
    exit_code: int | None = None  # a script's, as shells have it (128 + signal)
    exceptions: tuple[str, ...] = ()  # dotted names of the trainer's exception and its bases
    others_know: bool = False  # the other ranks end by themselves, after a last checkpoint
    output: str = field(default="", compare=False, repr=False)  # the end of what it printed
    # the exception itself where it could be carried over, else None
    error: BaseException | None = field(default=None, compare=False)

    @property
    def has_begun(self) -> bool:
        """Whether it certainly reached its first step."""
        reached = self.end_step is not None or self.micro_batch is not None
        return self.began_training or reached

    @property
    def taken_by_others_bytes(self) -> int:
        """By how much the GPU's free memory fell without us, 0 where that is not known."""
        if self.gpu_free_before_bytes is None or self.gpu_free_after_bytes is None:
            return 0
        return max(self.gpu_free_before_bytes - self.gpu_free_after_bytes, 0)

    @property
    def label(self) -> str:
        """``completed`` or the failure's kind, as ``summary.json`` spells it."""
        return "completed" if self.failure is None else self.failure.kind.value


@dataclass(frozen=True)
class Attempt:
    """One finished attempt: what it used and how it ended."""

    spec: AttemptSpec
    outcome: Outcome


@dataclass(frozen=True)
class RetryRule:
    """One of the user's own rules: what to do after a failure to which all it names applies."""

    then: str  # `retry`, `stop`, `exclude_gpu` or `smaller_batch`
    exit_code: int | None = None  # of a script
    message: str | None = None  # pattern that is found in message, traceback or output
    exception: str | None = None  # class, or dotted name of one, as `except` has it
    times: int | None = None  # at most, without progress in between; None: `max_retries`


@dataclass(frozen=True)
class Room:
    """Free memory that must be there first."""

    # on all of these GPUs; empty: on `counts` of them, whichever they are
    gpu_uuids: tuple[str, ...]
    free_bytes: int  # on each of them
    exclude: tuple[str, ...] = ()  # GPUs that will not do
    counts: tuple[int, ...] = (1,)  # of GPUs where none are named: the first that can be had


@dataclass(frozen=True)
class Retry:
    """Decision: run ``spec`` next."""

    spec: AttemptSpec  # what to use
    action: str  # the remedy's name, as `summary.json` spells it
    reason: str  # one sentence
    warning: str | None = None  # what the user should know besides, or None
    pause_seconds: float = 0.0  # to let pass before
    room: Room | None = None  # to wait for before, or None
    otherwise: Decision | None = None  # what to do if there is no room in time


@dataclass(frozen=True)
class GiveUp:
    """Decision: no further attempt. ``action`` is ``stopped`` where the user stopped the job."""

    reason: str
    action: str = "give_up"


Decision = Retry | GiveUp
