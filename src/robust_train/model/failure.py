"""Describes why an attempt failed: a :class:`Failure` has a kind, a message and evidence.

:mod:`robust_train.failures` classifies errors in the attempt's process and exits in the launcher.
The rules of the policy choose a remedy by the kind and the evidence. Memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from robust_train.model.json import Json
from robust_train.model.parts import Part, Record, parts_like


class FailureKind(str, Enum):
    """The kind of a failure. Files contain its value."""

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
        """Whether a rank may fail like this because another rank failed first."""
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
    """The known facts about a failure. None means that a fact is not available.

    Features keep their facts in findings. Programs read those facts like fields of this class.
    """

    kind_of_part = Finding

    requested_bytes: int | None = None  # the allocation that failed
    allocated_bytes: int | None = None  # held by live tensors
    reserved_unallocated_bytes: int | None = None  # held by the caching allocator but unused
    free_bytes: int | None = None  # free on the device at that moment
    total_bytes: int | None = None  # total memory of the device
    allowed_bytes: int | None = None  # memory that `memory.fraction` lets this process use
    # Whether the process reached its own limit while the device had enough free memory.
    own_limit: bool = False
    # A detail that the message or the stack shows, a value of `Clue`.
    clue: str | None = None
    # The library that raised the error (`torch`, `cublas`, `cudnn`, `numpy`, `kernel` …).
    library: str | None = None
    # Whether a checkpoint exists from before the data or the steps that led to the failure.
    has_checkpoint: bool = False

    # Type checkers do not see this method, so this package's own code has to read a feature's
    # figures through the feature's class.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a feature's figure."""
            kinds = [] if name.startswith("_") else parts_like(Finding)
            for kind in kinds:
                if name in kind.__dataclass_fields__:
                    return getattr(self.of(kind), name)
            raise AttributeError(f"Evidence has no {name!r}", name=name, obj=self)

    @property
    def is_hardware(self) -> bool:
        """Whether the GPU itself is faulty, so that another process would fail on it as well."""
        return self.clue == Clue.HARDWARE

    @property
    def fragmented(self) -> bool:
        """Whether the allocator held at least as much unused memory as was requested."""
        requested = self.requested_bytes
        unused = self.reserved_unallocated_bytes
        return bool(requested and unused and unused >= requested)

    def as_json(self) -> dict[str, Json]:
        """Return the evidence in JSON's types."""
        content: dict[str, Json] = {}
        for name, value in self.fields_as_json().items():
            if name == "own_limit":
                content["fragmented"] = self.fragmented
            content[name] = value
        return content

    @classmethod
    def parse(cls, data: Mapping[str, Json]) -> Evidence:
        """Parse the result of :meth:`as_json`.

        Raises:
            MalformedEventError: a field is missing or has another type.
        """
        return cls.from_fields(data)


class Clue:
    """Values of :attr:`Evidence.clue`. They are plain strings, so they need no conversion to JSON.

    Each value names a cause, unless its comment says otherwise.
    """

    HARDWARE = "hardware"  # the GPU itself is faulty: ECC, NVLink, a lost device
    BUSY = "busy"  # the device refused a context for now
    # The driver refused a call, for example because it lacks virtual memory management.
    DRIVER = "driver"
    IMPORT = "import"  # memory ran out while a module was imported
    MODEL = "model"  # memory ran out while a model was created, loaded or moved to the device
    # GPU memory ran out outside of torch's cache, where a smaller batch saves nothing.
    OUTSIDE = "outside"
    GPU_MODEL = "gpu_model"  # the build of torch has no code for GPUs of this model
    NO_CUDA_BUILD = "no_cuda_build"  # torch was built without CUDA
    SHARED_MEMORY = "shared_memory"  # `/dev/shm` is too small
    RATE_LIMIT = "rate_limit"  # a server refused a request because it had received too many
    SEGMENTS = "segments"  # the error occurs only with expandable segments
    CRASHED = "crashed"  # a segmentation fault in the trainer
    DOWNLOAD = "download"  # data or weights could not be downloaded
    PORT = "port"  # another process uses the port
    KILLED = "killed"  # SIGKILL, from neither the launcher nor the kernel's OOM killer
    REFUSED = "refused"  # torch.load accepts weights only, and the file contains more
    DAMAGED = "damaged"  # a checkpoint or another file cannot be read to its end
    STALLED = "stalled"  # no sign of life, or no progress, for too long
    USER_ERROR = "user_error"  # a mistake of the user, which the trainer states in one line
    UNCLEAR = "unclear"  # the message has several causes, but memory had nearly run out
    # The cause is unknown: the failure matches no known failure, but it may not be a bug either.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed."""

    kind: FailureKind
    message: str  # one line
    evidence: Evidence = field(default_factory=Evidence)
    advice: tuple[str, ...] = ()  # sentences for the user, the most useful first
    # The rank in which the failure began, None for a single process or if the rank is unknown.
    rank: int | None = None
