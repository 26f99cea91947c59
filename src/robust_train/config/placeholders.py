"""The values that an attempt passes to a script, such as ``{batch_size}``, and the plans for
splitting its batch and for saving.

The attempt fills the placeholders in the script's arguments, and sets the same values as variables
in its environment. The script's process reads these variables by this module too, so the module
imports no library.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robust_train.config.schema import RobustConfig
    from robust_train.model.spec import AttemptSpec

PREFIX = "ROBUST_TRAIN_"
EVENTS_VARIABLE = PREFIX + "EVENTS"
RUN_DIR_VARIABLE = PREFIX + "RUN_DIR"
OVERRIDES_VARIABLE = PREFIX + "OVERRIDES"
AUTO = "auto"

_PLACEHOLDER = re.compile(r"\{([a-z_]+|\$)\}")
_INTERPOLATION = re.compile(r"\$(?=\$*\{)")


@dataclass(frozen=True)
class ScriptValues:
    """The values of an attempt. Each field is a placeholder, and a variable in upper case."""

    batch_size: int  # micro-batch
    # Micro-batches of each process per optimizer step.
    gradient_accumulation_steps: int
    effective_batch_size: int  # samples of all processes per optimizer step
    # As given, scaled if the user asked for it, and smaller after training has diverged.
    learning_rate: str
    # Number of processes that the script must start, one for each GPU that it sees.
    num_gpus: int
    min_batch_size: int  # the smallest micro-batch of any attempt
    num_workers: int  # data-loader workers
    # `cuda:0`, which is the first and usually the only GPU that the script sees, or `cpu`.
    device: str
    attempt: int  # number of the attempt, counted from 1
    checkpoint: str  # the checkpoint to resume from; empty for a fresh start
    run_dir: str  # the job's run folder
    # Longest time without a checkpoint, or `auto`.
    checkpoint_every_minutes: str = AUTO
    # Largest number of optimizer steps without a checkpoint; 0 for any number.
    checkpoint_every_steps: int = 0
    keep_checkpoints: int = 2  # number of checkpoints that `run.save` keeps
    # `true`: recompute activations to save memory.
    gradient_checkpointing: str = "false"
    # The reaction if splitting changes the loss: `warn`, `other_remedies_first` or `exact`.
    split_rule: str = "warn"

    def fill(self, text: str, quote: Callable[[str], str] = str) -> str:
        """Replace the placeholders in ``text``. Other braces (JSON, shell) stay unchanged. ``{$}``
        is a dollar sign, because ``${…}`` is an interpolation in a config."""
        values = {**asdict(self), "$": "$"}

        def fill_match(match: re.Match[str]) -> str:
            return quote(str(values.get(match[1], match[0])))

        return _PLACEHOLDER.sub(fill_match, text)

    def environment(self) -> dict[str, str]:
        """Return the values as environment variables, ``ROBUST_TRAIN_BATCH_SIZE`` and so on."""
        return {PREFIX + name.upper(): str(value) for name, value in asdict(self).items()}


def decimal(number: float) -> str:
    """Return a number as text without an exponent, and without rounding errors of its computation.

    A script's YAML parser reads an exponent without a dot (``1e-05``) as text, and ``bc`` does not
    read it at all.
    """
    shortest = f"{number:.12g}"
    if not math.isclose(float(shortest), number, rel_tol=1e-14):
        shortest = repr(number)
    return format(Decimal(shortest), "f")


PLACEHOLDERS = tuple(field.name for field in fields(ScriptValues))


def literal(text: str) -> str:
    """Return ``text`` with ``${`` escaped as ``{$}{``, so that a config does not interpolate it.
    Filling the placeholders restores it."""
    return _INTERPOLATION.sub("{$}", text)


def placeholders_in(text: str) -> set[str]:
    """Return the placeholders that ``text`` uses."""
    return set(_PLACEHOLDER.findall(text)).intersection(PLACEHOLDERS)


def near_miss_in(text: str, *, every: bool) -> tuple[str, str] | None:
    """Return the first unknown name in braces that resembles a placeholder, and that placeholder,
    or None. With ``every``, any unknown name counts."""
    for name in _PLACEHOLDER.findall(text):
        if name not in (*PLACEHOLDERS, "$"):
            cutoff = 0.0 if every else 0.75
            close = difflib.get_close_matches(name, PLACEHOLDERS, 1, cutoff)
            if close:
                return name, close[0]
    return None


def value_from(environ: Mapping[str, str], name: str) -> str | None:
    """Return a value from a script's environment, or None if the launcher does not run it."""
    return environ.get(PREFIX + name.upper())


@dataclass(frozen=True)
class MicroBatchPlan:
    """The plan by which the batch of a step is split."""

    # Largest number of samples in one forward and backward pass. None starts with the whole batch.
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    min_batch_size: int = 1  # a part of this size is not split further

    @property
    def samples(self) -> int | None:
        """Samples of a rank in an optimizer step, or None if unknown."""
        if not self.batch_size:
            return self.batch_size
        return self.batch_size * self.gradient_accumulation_steps

    @classmethod
    def of(cls, config: RobustConfig) -> MicroBatchPlan:
        """Return the plan of an attempt's config."""
        return cls(
            batch_size=config.training.batch_size,
            gradient_accumulation_steps=config.training.gradient_accumulation_steps,
            min_batch_size=config.min_batch_size,
        )


@dataclass(frozen=True)
class SplitRule:
    """The reaction if the losses of a batch's parts do not add up to the loss of the batch.

    Attributes:
        is_exact: whether such a step must not be computed in parts.
        ends_attempt: whether running out of memory then ends the attempt, because the launcher has
            other remedies.
    """

    is_exact: bool = False
    ends_attempt: bool = False

    @classmethod
    def of(cls, config: RobustConfig, spec: AttemptSpec) -> SplitRule:
        """Return the rule of an attempt."""
        preserves = config.preserve_effective_batch_size
        may_end = preserves is not False and not spec.noted("splits_loss", False)
        return cls(is_exact=preserves is True, ends_attempt=may_end)

    @classmethod
    def named(cls, name: str | None) -> SplitRule:
        """Return the rule with this :attr:`name`. Without a name, return the rule ``warn``."""
        rules = {rule.name: rule for rule in (cls(), cls(False, True), cls(True, True))}
        return rules.get(name or "", cls())

    @property
    def name(self) -> str:
        """The value in a script's environment: ``exact``, ``other_remedies_first`` or ``warn``."""
        if self.is_exact:
            return "exact"
        return "other_remedies_first" if self.ends_attempt else "warn"


@dataclass(frozen=True)
class SavePlan:
    """The plan by which checkpoints are saved."""

    # Longest time between two checkpoints. None means as often as saving is cheap.
    every_seconds: float | None = None
    # Largest number of optimizer steps between two checkpoints. 0 means any number.
    every_steps: int = 0

    @classmethod
    def of(cls, config: RobustConfig) -> SavePlan:
        """Return the plan of a config."""
        minutes = config.training.checkpoint_every_minutes
        return cls(
            every_seconds=None if minutes is None else 60 * minutes,
            every_steps=config.training.checkpoint_every_steps or 0,
        )
