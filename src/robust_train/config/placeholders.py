"""The values that an attempt passes to a script, such as ``{batch_size}``.

The attempt's process fills the placeholders in the script's arguments, and sets the same values as
variables in the script's environment. The script's process uses this module to read the variables,
so the module imports no library.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal

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
