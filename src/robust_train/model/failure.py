"""Why an attempt ended, and the evidence for it. Memory is in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from robust_train.model.json import Json
from robust_train.model.parts import Part, Record, parts_like


class FailureKind(str, Enum):
    """The cause of the end of an attempt that did not complete."""

    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    WORKER_DEATH = "worker_death"
    DEVICE_FAULT = "device_fault"
    DEVICE_UNAVAILABLE = "device_unavailable"
    SETUP = "setup"  # CUDA works with no GPU of this machine, or of this model
    DISK_FULL = "disk_full"
    COMM = "comm"
    DIVERGED = "diverged"  # the loss is no longer usable
    INTERRUPTED = "interrupted"
    BUG = "bug"
    UNKNOWN = "unknown"  # written by a newer version

    @classmethod
    def _missing_(cls, value: object) -> FailureKind | None:
        return cls.UNKNOWN if isinstance(value, str) else None

    @property
    def is_memory(self) -> bool:
        """Whether memory ran out."""
        return self in MEMORY_FAILURES

    @property
    def in_words(self) -> str:
        """The kind for people, for example ``out of GPU memory``."""
        return _IN_WORDS[self]

    @property
    def follows_from_others(self) -> bool:
        """Whether a rank reports this after another rank has failed, so that it is not the
        cause."""
        return self in (FailureKind.COMM, FailureKind.INTERRUPTED)


_IN_WORDS = {
    FailureKind.DEVICE_OOM: "out of GPU memory",
    FailureKind.HOST_OOM: "out of host memory",
    FailureKind.WORKER_DEATH: "data-loader worker died",
    FailureKind.DEVICE_FAULT: "device fault",
    FailureKind.DEVICE_UNAVAILABLE: "device unavailable",
    FailureKind.SETUP: "CUDA cannot work here",
    FailureKind.DISK_FULL: "disk full or failing",
    FailureKind.COMM: "peer or network failed",
    FailureKind.DIVERGED: "training diverged",
    FailureKind.INTERRUPTED: "interrupted",
    FailureKind.BUG: "trainer failed",
    FailureKind.UNKNOWN: "failed for a reason that this version does not know",
}

MEMORY_FAILURES = frozenset({FailureKind.DEVICE_OOM, FailureKind.HOST_OOM})


@dataclass(frozen=True)
class Finding(Part):
    """Facts that a feature adds to the evidence of a failure."""


@dataclass(frozen=True)
class Evidence(Record[Finding]):
    """The known facts about a failure, in bytes. None if unavailable.

    Facts of features are in their findings, which can be read like fields.
    """

    kind_of_part = Finding

    requested_bytes: int | None = None  # the allocation that failed
    allocated_bytes: int | None = None  # held by live tensors
    # held by the caching allocator but unused
    reserved_unallocated_bytes: int | None = None
    free_bytes: int | None = None  # free on the device at that moment
    total_bytes: int | None = None  # total memory of the device
    # The part of it that `memory.fraction` lets this process use.
    allowed_bytes: int | None = None
    # the process reached its own limit while the device had enough free memory
    own_limit: bool = False
    # A detail beyond the kind that message or stack show, a value of Clue.
    clue: str | None = None
    # The library that raised it (`torch`, `cublas`, `cudnn`, `numpy`, `kernel` …).
    library: str | None = None
    # Whether a checkpoint exists from before the data or the steps that led to it.
    has_checkpoint: bool = False

    if not TYPE_CHECKING:  # this package's code names the feature whose figure it reads

        def __getattr__(self, name: str) -> Any:
            """Return a feature's figure."""
            kinds = [] if name.startswith("_") else parts_like(Finding)
            for kind in kinds:
                if name in kind.__dataclass_fields__:
                    return getattr(self.of(kind), name)
            raise AttributeError(f"Evidence has no {name!r}", name=name, obj=self)

    @property
    def is_hardware(self) -> bool:
        """Whether the GPU is at fault, not the program. Other faults end with the process."""
        return self.clue == Clue.HARDWARE

    @property
    def fragmented(self) -> bool:
        """Whether the allocator held at least as much unused memory as was requested."""
        requested = self.requested_bytes
        unused = self.reserved_unallocated_bytes
        return bool(requested and unused and unused >= requested)

    def as_json(self) -> dict[str, Json]:
        """Return the evidence in JSON's types."""
        items = list(self.fields_as_json().items())
        place = [name for name, _ in items].index("own_limit")
        items.insert(place, ("fragmented", self.fragmented))
        return dict(items)

    @classmethod
    def parse(cls, data: Mapping[str, Json]) -> Evidence:
        """Parse :meth:`as_json`.

        Raises:
            MalformedEventError: it is not such an object.
        """
        return cls.from_fields(data)


class Clue:
    """Values of :attr:`Evidence.clue`. They are plain strings, so that they travel as JSON."""

    # The GPU itself is at fault: ECC, NVLink, a lost device.
    HARDWARE = "hardware"
    BUSY = "busy"  # The device refused a context for now
    DRIVER = "driver"
    """The driver refused a call, as it does where it lacks virtual memory management."""
    IMPORT = "import"  # Memory ran out while a module was imported
    # Memory ran out while a model was made, loaded or moved to the device
    MODEL = "model"
    # The GPU's memory ran out outside of torch's cache, which a smaller batch does not shrink.
    OUTSIDE = "outside"
    GPU_MODEL = "gpu_model"  # The build has no code for GPUs of this model
    NO_CUDA_BUILD = "no_cuda_build"  # The build has no CUDA at all
    SHARED_MEMORY = "shared_memory"  # `/dev/shm` is too small
    RATE_LIMIT = "rate_limit"  # A server was asked too often
    SEGMENTS = "segments"  # Only with expandable segments
    CRASHED = "crashed"  # A segmentation fault in the trainer
    DOWNLOAD = "download"  # Data or weights could not be fetched
    PORT = "port"  # Another process has the port
    # SIGKILL, from neither the launcher nor the kernel's OOM killer
    KILLED = "killed"
    # torch.load reads weights only, and the file contains more.
    REFUSED = "refused"
    # A checkpoint, or another file, that cannot be read to its end.
    DAMAGED = "damaged"
    STALLED = "stalled"  # No sign of life, or no progress, for too long
    # A user's mistake that the trainer states in one line.
    USER_ERROR = "user_error"
    # The message has other causes too, but memory had nearly run out.
    UNCLEAR = "unclear"
    # Nothing shows the cause: it is not a known failure, and not certainly the program's.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: its kind, one line of message, the evidence and ordered advice.

    ``rank`` is the rank in which it began, None for a single process or if it is unknown.
    """

    kind: FailureKind
    message: str
    evidence: Evidence = field(default_factory=Evidence)
    advice: tuple[str, ...] = ()
    rank: int | None = None
