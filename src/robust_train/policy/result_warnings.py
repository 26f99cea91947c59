"""Warns before an attempt whose changes may affect the result of training. Pure.

`FailureContext.retry` calls `warn_of_changes` in the launcher for each retry. A warning that an
earlier attempt has already caused is not repeated.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from robust_train.model.spec import AttemptSpec

if TYPE_CHECKING:
    from robust_train.policy.context import FailureContext

_HAS_NO_KEY = (
    "the project's config has no key for the accumulation. If the key has another name, set "
    "robust.training.gradient_accumulation_steps='${its.name}'. To stop instead, set "
    "robust.preserve_effective_batch_size=true"
)
_CANNOT_ACCUMULATE = (
    "the command does not contain {gradient_accumulation_steps}. Add it if the script can "
    "accumulate. Otherwise scale the learning rate (--learning-rate, --scale-learning-rate and "
    "{learning_rate}), or stop instead (--keep-effective-batch)"
)
_DIVIDES = (
    "gradients stay the same if the script divides the loss by that number, and if the loss is a "
    "mean over samples"
)
_ADDS_UP_MEANS = (
    "under transformers' Trainer, gradients may be {factor} times as large if a model accepts "
    "num_items_in_batch and ignores it, as BERT for sequence classification does. For such a "
    "model, set trainer.model_accepts_loss_kwargs = False before trainer.train()"
)
# A frame of a traceback from transformers' Trainer, or the figures that it prints.
_TRANSFORMERS_TRAINER = re.compile(
    r"[/\\]transformers[/\\]trainer\w*\.py\b"
    r"|\{'(?:loss|eval_loss|train_runtime)': [^}]{0,400}'epoch': "
)


def warn_of_changes(context: FailureContext, spec: AttemptSpec) -> str:
    """Return warnings about the next attempt in one text, empty if there are none."""
    warnings = (
        _warn_of_effective_batch(context, spec),
        _warn_of_gradients(context, spec),
        _warn_of_position(context, spec),
    )
    return "; ".join(warning for warning in warnings if warning)


def _warn_of_effective_batch(context: FailureContext, spec: AttemptSpec) -> str:
    """Warn once if the effective batch differs from the requested effective batch."""
    config = context.config
    requested = context.settings.asked
    wanted = requested.effective_batch_size
    now = spec.effective_batch_size
    if now in (wanted, context.attempt.spec.effective_batch_size):
        return ""
    if requested.accumulates and config.preserve_effective_batch_size is not False:
        return (
            f"no micro-batch from {context.settings.min_batch_size} to {spec.batch_size} divides "
            f"the effective batch size {wanted}; it is now {now}"
        )
    change = f"the effective batch size is now {now} instead of {wanted}"
    may_accumulate = config.traits.accumulates_by_itself
    if may_accumulate and not requested.accumulates:
        change += " if the script does not accumulate by itself"
    if config.preserve_effective_batch_size is False:
        return f"{change}: preserve_effective_batch_size is false"
    if config.trainer.scale_learning_rate is not None:
        was = config.learning_rate_at(wanted)
        rate = config.learning_rate_at(now)
        return f"{change}; the learning rate is {rate:.4g} instead of {was:.4g}"
    if any(earlier.spec.effective_batch_size != wanted for earlier in context.history):
        return change
    way_out = _CANNOT_ACCUMULATE if may_accumulate else _HAS_NO_KEY
    return f"{change}: {way_out}"


def _warn_of_gradients(context: FailureContext, spec: AttemptSpec) -> str:
    """Warn before the first attempt of a script whose accumulation may change gradients."""
    requested = context.settings.asked.gradient_accumulation_steps
    now = spec.gradient_accumulation_steps
    if not context.config.traits.accumulates_by_itself or now == requested:
        return ""
    history = context.history
    if any(earlier.spec.gradient_accumulation_steps != requested for earlier in history):
        return ""
    change = f"the script accumulates {now} micro-batches instead of {requested}"
    outputs = [earlier.exit.output for earlier in history]
    if any(_TRANSFORMERS_TRAINER.search(output) for output in outputs):
        return f"{change}: {_ADDS_UP_MEANS.format(factor=f'{now / requested:g}')}"
    return f"{change}: {_DIVIDES}"


def _warn_of_position(context: FailureContext, spec: AttemptSpec) -> str:
    """Warn if a script may resume at another sample."""
    was = context.last.batch_size
    now = spec.batch_size
    if was == now or not context.config.traits.saves_by_itself:
        return ""
    if not any(earlier.checkpoint or earlier.resumed_from for earlier in context.history):
        return ""
    return (
        f"the checkpoint was written with micro-batch {was}, and the script resumes with {now}: if "
        "it counts batches, and not samples or steps, it resumes at another sample, and if it "
        f"takes its options from the checkpoint, it keeps {was}"
    )
