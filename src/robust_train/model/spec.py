"""The settings of an attempt, its speed, and the decisions after it.

The policy creates them in the launcher, and the attempt reads its spec. Memory is in bytes and time
in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from robust_train.model.gpu import GpuInfo, Group, device_name
from robust_train.model.json import Json
from robust_train.model.parts import Part, Record

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig

K = TypeVar("K", bound="Knob")

MAXIMIZE = "maximize"
MINIMIZE = "minimize"
"""The direction of a sweep's objective, as Optuna writes it."""


@dataclass(frozen=True)
class Knob(Part):
    """A feature's choice for an attempt."""

    @classmethod
    def from_config(cls: type[K], config: RobustConfig, environ: Mapping[str, str]) -> K:
        """Return the user's choice, from a job's config and environment."""
        return cls()

    def for_unknown_size(self: K, config: RobustConfig, spec: AttemptSpec) -> K:
        """Return the choice for an attempt with ``training.batch_size=auto``, which begins with the
        whole batch, because no size is known for its kind of device."""
        return self

    def for_known_size(self: K) -> K:
        """Return the choice for an attempt with a known micro-batch."""
        return self

    def apply_to_config(self, config: RobustConfig) -> RobustConfig:
        """Apply the choice to an attempt's config."""
        return config

    def apply_to_environ(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Apply the choice to an attempt's environment."""
        return environ


@dataclass(frozen=True)
class AttemptSpec(Record[Knob]):
    """The settings of an attempt. Choices of features are in their knobs."""

    kind_of_part = Knob

    gpus: Group  # the GPU of rank 0 first; empty for the CPU
    # Micro-batch: samples in one forward and backward pass of a rank.
    batch_size: int
    # Micro-batches of each rank per optimizer step.
    gradient_accumulation_steps: int
    ranks: int = 1  # processes that share an optimizer step, one for each GPU
    # False for a script that gets no batch size. The batch size is 1 then.
    has_batch: bool = True
    # False for a trainer that gets no accumulation. Whatever the accumulation is, it makes 1.
    accumulates: bool = True

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches of each rank per optimizer step, as far as the trainer is known to make
        them."""
        return self.gradient_accumulation_steps if self.accumulates else 1

    @property
    def gpu(self) -> GpuInfo | None:
        """The GPU of rank 0, None on the CPU."""
        return self.gpus[0] if self.gpus else None

    @property
    def device(self) -> str:
        """The device's name for people: ``cuda:<NVML index>``, with commas, or ``cpu``."""
        return device_name(self.gpus)

    @property
    def where(self) -> str:
        """The device in a sentence: ``cuda:<NVML index>``, with commas, or ``the CPU``."""
        return self.device if self.gpus else "the CPU"

    @property
    def device_key(self) -> str:
        """The device's identity, independent of the order of the GPUs: their UUIDs, or ``cpu``."""
        return ",".join(sorted(gpu.uuid for gpu in self.gpus)) or "cpu"

    @property
    def device_kind(self) -> str:
        """The properties of the device that the memory for a step depends on: model and size, or
        ``cpu``."""
        return "cpu" if self.gpu is None else f"{self.gpu.name} {self.gpu.total_bytes}"

    def with_batch(self, batch_size: int | None, accumulation: int | None) -> AttemptSpec:
        """Return the spec with another split of the batch. None leaves a figure unchanged."""
        spec = self.having(*(knob.for_known_size() for knob in self.parts))
        return replace(
            spec,
            batch_size=batch_size or self.batch_size,
            gradient_accumulation_steps=accumulation or self.gradient_accumulation_steps,
        )

    def supporting(self, features: Collection[str]) -> AttemptSpec:
        """Return the spec for a trainer that reads these values of an attempt."""
        return replace(
            self,
            has_batch=self.has_batch or "batch_size" in features,
            accumulates=self.accumulates or "gradient_accumulation_steps" in features,
        )

    def as_json(self) -> dict[str, Json]:
        """Convert the spec to JSON's types. The batch is null for a script without a batch."""
        batch = {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "effective_batch_size": self.effective_batch_size,
        }
        return {
            "device": self.device,
            "gpu_uuid": None if self.gpu is None else self.gpu.uuid,
            "gpu_uuids": [gpu.uuid for gpu in self.gpus],
            **self.fields_as_json(),
            **(batch if self.has_batch else dict.fromkeys(batch)),
        }

    @classmethod
    def parse(cls, data: Mapping[str, Json]) -> AttemptSpec:
        """Parse :meth:`as_json`.

        Raises:
            MalformedEventError: it is not such an object.
        """
        batch = {
            name: data.get(name) or 1 for name in ("batch_size", "gradient_accumulation_steps")
        }
        has_batch = data.get("batch_size") is not None and data.get("has_batch", True)
        return cls.from_fields({**data, **batch, "has_batch": has_batch})


@dataclass(frozen=True)
class Speed:
    """How fast a rank trained in an attempt, without its first step, validation and checkpoints.
    None if unknown."""

    steps: int  # number of measured steps
    seconds_per_step: float  # median
    seconds_per_step_p95: float  # 95th percentile
    samples_per_second: float | None = None  # samples of this rank
    # The share of the time spent waiting for data, from 0 to 1.
    data_share: float | None = None
    # If that is not measured, the share from the end of a step to the next batch, whatever its use.
    between_share: float | None = None
    # Median of about the last half minute.
    seconds_per_step_now: float | None = None
    # Mean time until the ranks wait for each other.
    seconds_alone_per_step: float | None = None
    rank: int = 0


def find_slowest_rank(speeds: Iterable[Speed]) -> tuple[int, float, float] | None:
    """Return the slowest rank, its seconds per step until the ranks meet, and the median of the
    others, or None unless at least two ranks have measured that."""
    alone = {speed.rank: speed.seconds_alone_per_step or 0.0 for speed in speeds}
    alone = {rank: seconds for rank, seconds in alone.items() if seconds}
    if len(alone) < 2:
        return None
    slow = max(alone, key=lambda rank: alone[rank])
    return slow, alone.pop(slow), statistics.median(alone.values())


@dataclass(frozen=True)
class RetryRule:
    """The user's reaction to a failure that meets all conditions of the rule."""

    then: str  # `retry`, `stop`, `exclude_gpu` or `smaller_batch`
    exit_code: int | None = None  # exit code of a script
    # Pattern to find in message, traceback or output; empty for any.
    message: str = ""
    # Class, or its dotted name, as in `except`; empty for any.
    exception: str = ""
    # Most applications without progress in between; None for `max_retries`.
    times: int | None = None


@dataclass(frozen=True)
class Room:
    """A wait for free memory before an attempt."""

    # The GPUs to wait for, all of them. If empty, any `counts` GPUs will do.
    gpu_uuids: tuple[str, ...]
    free_bytes: int  # needed on each of these GPUs
    exclude: tuple[str, ...] = ()  # GPUs that will not do
    # Acceptable numbers of GPUs if none are named. The first available number counts.
    counts: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Retry:
    """Decision: run ``spec`` next."""

    spec: AttemptSpec  # what to use
    action: str  # the remedy's name, as `summary.json` spells it
    reason: str  # one sentence
    warning: str = ""  # a warning for the user in addition
    pause_seconds: float = 0.0  # pause before the attempt
    room: Room | None = None  # room to wait for before the attempt, or None
    otherwise: Decision | None = None  # the decision if there is no room in time


@dataclass(frozen=True)
class GiveUp:
    """Decision: no further attempt. ``action`` is ``stopped`` if the user stopped the job."""

    reason: str
    action: str = "give_up"


Decision = Retry | GiveUp
