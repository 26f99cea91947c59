"""Declares the kernel's keys: name, type, default, accepted values and meaning.

Every other key is declared in the ``model.py`` of its feature. ``just keys`` writes the comments in
``configs/*.yaml`` and the tables of ``docs/configuration.md`` from these declarations, and Hydra
checks types by them. The launcher and attempts read the values from a :class:`RobustConfig`, which
:func:`robust_train.config.checks.checked` creates once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from omegaconf import MISSING

from robust_train.config.values import (
    AUTO,
    EVENTS,
    FROM_0,
    FROM_1,
    POSITIVE,
    POSITIVE_SHARE,
    device_name,
    events,
    group,
    integer_or_auto,
    is_not_false,
    key,
    open_group,
    program_words,
    text_or_none,
    truth_or_path,
    words,
    words_of_list,
)
from robust_train.model.feature import FeatureKeys
from robust_train.model.spec import MAXIMIZE, MINIMIZE
from robust_train.model.traits import FUNCTION, PROGRAM, Traits
from robust_train.readable import MIB

K = TypeVar("K", bound=FeatureKeys)

BATCH = "training.batch_size"
ACCUMULATION = "training.gradient_accumulation_steps"
WORKERS = "training.num_workers"
CHECKPOINTING = "training.gradient_checkpointing"

UNREAD_IN_PROJECTS = ("seed", "training.prefetch_factor", "training.epochs", "training.lr")
"""Keys that only a trainer with this package's config can read. The code of a Hydra project gets
only the project's own config."""


@dataclass(frozen=True)
class TrainingConfig:
    """``training``: the values that every trainer needs, and that the launcher adapts."""

    batch_size: int = key(
        64,
        "micro-batch: samples in one forward and backward pass; `auto`: the largest that fits",
        accepts="integer or `auto`",
        range=FROM_1,
        read=integer_or_auto,
    )
    gradient_accumulation_steps: int = key(1, "micro-batches per optimizer step", range=FROM_1)
    effective_batch_size: int | None = key(
        None,
        "samples per optimizer step; accumulation follows from it",
        more="With `batch_size=auto` 64 if not given",
        range=FROM_1,
    )
    num_workers: int = key(
        2, "data-loader workers of each process", range=FROM_0, follows="dataset.num_workers"
    )
    prefetch_factor: int = key(2, "batches that each worker prepares ahead", range=FROM_1)
    epochs: int = key(10, "passes over the training data", range=FROM_1, follows="dataset.epochs")
    lr: float = key(1e-3, "learning rate", range=POSITIVE, follows="model.lr")
    gradient_checkpointing: bool | None = key(
        None,
        "less memory for more time; `auto`: if the smallest micro-batch does not fit",
        more="`false`: never ([recovery](recovery.md#gradient-checkpointing))",
        choices=(AUTO, True, False),
        written=AUTO,
    )
    checkpoint_every_minutes: float | None = key(
        None,
        "longest time between checkpoints; `auto`: as often as saving is cheap",
        more="Then every 10 seconds to 5 minutes, for at most 1 % of the time; more often in the "
        "first minutes and after failures",
        unit="minutes",
        range=FROM_0,
        written=AUTO,
    )
    checkpoint_every_steps: int | None = key(
        None, "in addition to the minutes: at most this many steps are lost", range=FROM_0
    )
    keep_checkpoints: int = key(2, "number of checkpoints kept", range=FROM_1)
    log_every_steps: int = key(
        50, "steps between progress lines if no live status is shown", range=FROM_1
    )


@dataclass(frozen=True)
class MemoryConfig:
    """``memory``: settings for the memory of each attempt."""

    fraction: float = key(
        0.95,
        "share of the GPU's memory that an attempt's tensors and cache may take",
        range=POSITIVE_SHARE,
    )


@dataclass(frozen=True)
class NotifyConfig:
    """``notify``: where notifications are sent, and for which events."""

    command: tuple[str, ...] = key(
        (),
        "program and arguments; it gets the notification as JSON on standard input",
        accepts="string or list",
        written=None,
        read=words,
    )
    urls: tuple[str, ...] = key(
        (),
        "URLs of [Apprise](https://github.com/caronc/apprise), in addition to "
        "`$ROBUST_TRAIN_NOTIFY_URLS`",
        accepts="string or list",
        written=None,
        read=words,
        is_secret=True,
    )
    on: tuple[str, ...] = key(
        EVENTS,
        "a list of " + ", ".join(f"`{event}`" for event in EVENTS) + "; `null`: all",
        accepts="list",
        written=None,
        read=events,
    )


@dataclass(frozen=True)
class TrainerConfig:
    """``trainer``: the callable, ``_target_``, or the keys of ``trainer=command``."""

    _target_: str | None = key(
        None,
        "dotted path of any callable `train(cfg)` or `train(cfg, run)`",
        accepts="string",
        read=text_or_none,
    )
    argv: tuple[str, ...] | None = key(
        None,
        "program and arguments; {batch_size}, {checkpoint} and so on are filled in",
        accepts="list",
        written=MISSING,
        read=program_words,
    )
    resume_argv: tuple[str, ...] = key(
        (), "appended if there is a checkpoint", accepts="list", written=[], read=words_of_list
    )
    checkpoint_glob: str | None = key(None, "pattern of the script's own checkpoints")
    cwd: str | None = key(None, "the script's working directory; `null`: the command's")
    stop_signal: str = key(
        "TERM",
        "signal that asks the script to stop; after `stop_grace_seconds` the script is killed",
        choices=("TERM", "INT", "USR1"),
    )
    scale_learning_rate: str | None = key(
        None,
        "how {learning_rate} follows an effective batch that cannot be kept",
        choices=("linear", "sqrt"),
    )


@dataclass(frozen=True)
class OpenConfig:
    """The keys of ``model`` and ``dataset`` that the launcher reads. A project may put anything
    there."""

    name: str | None = key(None, "", read=text_or_none)
    root: str | None = key(None, "", read=text_or_none)
    download: bool = key(True, "", read=is_not_false)


@dataclass(frozen=True)
class PlainConfig:
    """The root of ``configs/robust/config.yaml``, which serves ``train.py``."""

    model: OpenConfig = open_group(OpenConfig)
    dataset: OpenConfig = open_group(OpenConfig)
    trainer: TrainerConfig = open_group(TrainerConfig)
    device: str = key(
        "auto",
        "`auto`, `cpu`, `cuda` (any GPU), `cuda:1`, a GPU's UUID (or its beginning), or several "
        "GPUs: `[2,3]`",
        more="Without a GPU here, all but `auto` and `cpu` are refused "
        "([some of the GPUs](queue.md#use-only-some-of-the-gpus))",
        section="Device and queue",
        accepts="string, integer or list",
        read=device_name,
    )
    seed: int = key(42, "seed of everything random", range=FROM_0, section="Training")
    training: TrainingConfig = group(TrainingConfig, "Training")
    memory: MemoryConfig = group(MemoryConfig, "Memory")


@dataclass(frozen=True)
class RobustConfig(PlainConfig):
    """The root of ``configs/robust.yaml``, which serves ``train_robust.py``.

    After the keys, it has a few fields that :mod:`.checks` computes, and properties that answer
    questions about several keys.
    """

    auto_device: bool | None = key(
        None,
        "pick the GPU with the most free memory; `false`: use `device`",
        more="`null`: `true`, unless `device` names the CPU or one GPU",
        section="Device and queue",
    )
    num_gpus: int = key(
        1,
        "GPUs for this one job, one process each",
        more="([several GPUs](several-gpus.md))",
        range=FROM_1,
    )
    min_gpu_memory_mb: int = key(
        4000,
        "memory that must be free on each GPU before it is taken; `auto`: the measured need",
        more="([queue](queue.md#memory-as-measured))",
        accepts="integer or `auto`",
        unit="MiB",
        range=FROM_0,
        read=integer_or_auto,
    )
    wait_for_gpu: bool = key(True, "wait until a GPU has this much free memory")
    gpu_wait_timeout_minutes: float = key(
        60.0, "longest wait for a GPU", unit="minutes", range=FROM_0
    )
    gpu_check_interval_seconds: float = key(
        30.0, "longest time between two polls while waiting", unit="seconds", range=POSITIVE
    )
    gpu_queue: bool | str = key(
        True,
        "queue and reserve GPUs with the host's other jobs; a path: in this queue directory",
        more="([queue](queue.md#set-it-up-for-several-users))",
        accepts="boolean or path",
        read=truth_or_path,
    )
    gpu_jobs_per_device: int = key(
        1,
        "maximum number of jobs per GPU that this job accepts, including itself; `auto`: as many "
        "as fit",
        more="([sweeps](sweeps.md#share-gpus))",
        accepts="integer or `auto`",
        range=FROM_1,
        read=integer_or_auto,
    )
    queue_priority: str = key(
        "auto",
        "`low`, `normal` or `high` among your own jobs; `auto`: `low` in a sweep, else `normal`",
        more="([queue](queue.md#who-goes-first))",
        choices=("auto", "low", "normal", "high"),
    )
    allow_cpu_fallback: bool = key(True, "train on the CPU if no GPU is suitable")
    job_name: str | None = key(
        None,
        "name of the job; `null`: `<model>_<dataset>`, or the function or script",
        more="Shown in the queue, in tables and in the name of the run folder",
    )

    min_batch_size: int = key(
        4, "no attempt uses a smaller micro-batch", range=FROM_1, section="Recovery"
    )
    max_retries: int | None = key(
        None,
        "smaller micro-batches tried on one device before the next device; `auto`: 3",
        more="`auto` also tries the remaining sizes before the CPU is used or the job ends. This "
        "also limits retries without a change. A later checkpoint renews both limits "
        "([recovery](recovery.md))",
        range=FROM_0,
        read=integer_or_auto,
        written=AUTO,
    )
    preserve_effective_batch_size: bool | None = key(
        None,
        "accumulation grows as the micro-batch shrinks; `true`: stop if that is impossible",
        more="`auto`: continue with another effective batch, with a warning; `false`: never grow",
        choices=(AUTO, True, False),
        written=AUTO,
    )
    isolation: str = key(
        "process",
        "`process`: attempts are child processes; `none`: they run in this process, for debuggers",
        choices=("process", "none"),
    )
    stop_grace_seconds: float = key(
        20.0, "time for a last checkpoint after Ctrl-C or SIGTERM", unit="seconds", range=FROM_0
    )
    retry_pause_seconds: float = key(
        10.0,
        "pause before a retry after a network failure; doubles each time",
        more="Up to an hour",
        unit="seconds",
        range=FROM_0,
    )
    resume: bool = key(True, "resume an unfinished job in its run folder")
    max_launches: int = key(
        3,
        "launches in a row without a new checkpoint; `0`: any number",
        more="The next launch is refused with exit code 76 "
        "([recovery](recovery.md#launches-without-progress))",
        range=FROM_0,
    )
    notify: NotifyConfig = group(NotifyConfig, "Notifications")
    sweep_fail_fast: bool = key(False, "the first failure ends the sweep", section="Sweeps")
    sweep_patience: int | None = key(
        None,
        "reports in a row at which a job of a sweep may be worse than another before it is pruned",
        more="`null`: any number",
        range=FROM_1,
    )
    sweep_direction: str = key(
        "auto",
        "which result of a sweep is best, the largest (`maximize`) or the smallest (`minimize`)",
        more="`auto`: the smallest if `objective` is named like a loss or an error, else the "
        "largest",
        choices=("auto", MAXIMIZE, MINIMIZE),
    )
    objective: str | None = key(
        None,
        "the figure of a dictionary of results that a sweep optimises; `null`: `optimized_metric`",
        more="`optimized_metric` may be a key of the project's config",
    )

    # --- results of the checks, which are not keys ---

    # True for `training.batch_size=auto`. The batch_size is then the largest size to try.
    finds_batch_size: bool = False
    # True for `min_gpu_memory_mb=auto`. The default applies until a feature has measured the job.
    measures_memory: bool = False
    # True for `gpu_jobs_per_device=auto`. The value is 1 until a feature has measured the job.
    packs_gpus: bool = False
    # The project's key for each of our keys that refers to a project's key. None if our keys are at
    # the root of the config.
    theirs: dict[str, str] | None = None
    # The values of each feature whose keys do not all have their defaults. They are FeatureKeys,
    # a type that OmegaConf does not accept here.
    of_features: tuple[Any, ...] = ()

    # --- the values of features' keys ---

    def of(self, keys: type[K]) -> K:
        """Return the values of a feature's keys."""
        for feature_keys in self.of_features:
            if isinstance(feature_keys, keys):
                return feature_keys
        return keys()

    def chosen(self, name: str) -> Any:
        """Return the user's value for a key that a feature declares.

        The kernel calls it because it must not import the class of the keys. Returns None if all
        keys of the feature have their defaults, or if the feature was deleted.
        """
        for feature_keys in self.of_features:
            if hasattr(feature_keys, name):
                return getattr(feature_keys, name)
        return None

    def having(self, keys: FeatureKeys) -> RobustConfig:
        """Return a copy of the config with these values of a feature's keys."""
        kind = type(keys)
        values = [other for other in self.of_features if type(other) is not kind]
        has_defaults = keys == kind()
        if not has_defaults:
            values.append(keys)
        return replace(self, of_features=tuple(values))

    def without(self, name: str) -> RobustConfig:
        """Return a copy with the defaults of the feature that declares the key ``name``."""
        others = tuple(keys for keys in self.of_features if not hasattr(keys, name))
        return replace(self, of_features=others)

    # --- the trainer ---

    @property
    def target(self) -> str | None:
        """The dotted path of the trainer, or None if the config has none."""
        return self.trainer._target_

    @property
    def is_built_in(self) -> bool:
        """Whether the trainer is part of this package."""
        return (self.target or "").startswith("robust_train.vision.")

    @property
    def traits(self) -> Traits:
        """The abilities of the trainer. A project's function can be given a batch size only if the
        project has a key for it."""
        if self.trainer.argv is not None:
            return PROGRAM
        if self.theirs is None:
            return FUNCTION
        has_batch = BATCH in self.theirs
        accumulates = ACCUMULATION in self.theirs
        return replace(FUNCTION, has_batch=has_batch, accumulates=accumulates)

    @property
    def may_checkpoint_gradients(self) -> bool:
        """Whether gradient checkpointing is a remedy. In a project, our key must refer to one of
        the project's keys, which an attempt can then set."""
        if self.theirs is None or self.traits.is_program:
            return self.training.gradient_checkpointing is not False
        return CHECKPOINTING in self.theirs

    @property
    def data_folder(self) -> str | None:
        """The folder in which the built-in trainer expects existing data, or None."""
        data = self.dataset
        if not self.is_built_in:
            return None
        # The digits come with scikit-learn, and a user's own images are never downloaded.
        is_local = data.name == "image_folder" or (not data.download and data.name != "digits")
        return data.root if is_local else None

    # --- the devices ---

    @property
    def picks_gpu(self) -> bool:
        """Whether the launcher chooses the GPU by free memory, because ``device`` names no GPU, or
        several."""
        if self.names_several:
            return True
        if self.auto_device is None:
            return self.device in (AUTO, "cuda")
        return self.auto_device

    @property
    def needs_gpu(self) -> bool:
        """Whether ``device`` requires a GPU, so that a machine without a GPU cannot run the job."""
        names_gpu = not self.picks_gpu and self.device not in (AUTO, "cpu")
        return names_gpu or self.names_several or self.device == "cuda"

    @property
    def names_several(self) -> bool:
        """Whether ``device`` names several GPUs, any of which is acceptable."""
        return "," in self.device

    @property
    def min_gpu_memory_bytes(self) -> int:
        """Memory that must be free on a GPU before it is taken."""
        return self.min_gpu_memory_mb * MIB

    @property
    def runs_inline(self) -> bool:
        """Whether attempts run in the launcher's process."""
        return self.isolation == "none"

    # --- the job ---

    @property
    def retries(self) -> int:
        """Limit for smaller micro-batches on one device, and for retries without a change."""
        return 3 if self.max_retries is None else self.max_retries

    def urgency(self, *, in_sweep: bool) -> int:
        """Return the job's urgency among its user's jobs: 0 low, 1 normal, 2 high."""
        urgencies = {"low": 0, "normal": 1, "high": 2}
        automatic = 0 if in_sweep else 1
        return urgencies.get(self.queue_priority, automatic)

    def learning_rate_at(self, effective_batch_size: int) -> float:
        """Return the learning rate for a script that trains with this effective batch."""
        training = self.training
        requested = training.batch_size * training.gradient_accumulation_steps * self.num_gpus
        power = {"linear": 1.0, "sqrt": 0.5}.get(self.trainer.scale_learning_rate or "", 0)
        return float(training.lr * (effective_batch_size / requested) ** power)
