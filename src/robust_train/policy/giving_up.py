"""The reason that a job states when it gives up: what failed, and what it tried.

:func:`.decide.decide` calls it in the launcher if no rule offers anything. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.policy.context import FailureContext

_HAS_NO_BATCH = (
    "the project's config has no key that is known as the batch size of training; name it: "
    "robust.training.batch_size='${its.name}'"
)


def why_give_up(context: FailureContext) -> str:
    """Return what failed, and what was tried, in one sentence."""
    kind = context.failure.kind
    message = context.failure.message
    if kind in (FailureKind.BUG, FailureKind.UNKNOWN) or context.evidence.clue == Clue.UNCLEAR:
        return _why_a_bug(context)
    if kind.is_memory and context.failed_before_training:
        if context.evidence.clue == Clue.IMPORT:
            return f"out of memory while a module was imported: no smaller batch helps: {message}"
        return (
            "out of memory before the first step: model, optimizer and data do not fit, and a "
            f"smaller batch does not help: {message}"
        )
    if context.attempt.cuda_cannot_work:
        return cannot_work(context.failure)
    count = context.failures_without_progress
    if kind in (FailureKind.INTERRUPTED, FailureKind.DIVERGED):
        return f"{message}, {count} times without progress" if count > 1 else message
    if kind is FailureKind.COMM:
        is_hang = context.evidence.library == "robust_train"
        what = "hang" if is_hang else "network failure"
        attempts = "attempts" if count > 1 else "attempt"
        return f"{what}, {count} {attempts} without progress: giving up ({message})"
    tried = _what_was_tried(context)
    if not kind.is_memory:
        again = " again after every remedy" if len(context.history) > 1 else ""
        return f"{kind.in_words}{again} ({tried}): {message}"
    hints = _why_no_more_memory(context)
    return f"out of memory on every device that may be used: {tried}{hints}"


def _why_a_bug(context: FailureContext) -> str:
    """Return the failure's message, and for an unknown failure why the program is to blame."""
    failure = context.failure
    message = failure.message
    if failure.rank is not None:
        message = f"{message} (rank {failure.rank})"
    before = context.unknown_before
    if context.evidence.clue != Clue.UNKNOWN or before is None:
        return message
    first = ""
    if before.message != failure.message:
        first = f"; the first time: {before.message}"
    return (
        f"{message}: twice at the same place, with no later checkpoint in between, so it is "
        f"the program's{first}"
    )


def _what_was_tried(context: FailureContext) -> str:
    """Return the devices, each with the micro-batches of its attempts, for a sentence."""
    tried: dict[str, list[str]] = {}
    for attempt in context.history:
        size = " down to ".join(map(str, attempt.sizes)) if attempt.spec.has_batch else ""
        tried.setdefault(attempt.spec.device, []).append(size)
    return "; ".join(
        f"{device} at micro-batch {', '.join(_counted(sizes))}" if any(sizes) else device
        for device, sizes in tried.items()
    )


def _counted(sizes: Sequence[str]) -> Iterator[str]:
    """Yield each size once, with the number of tries in a row."""
    for size, group in itertools.groupby(sizes):
        times = len(list(group))
        yield size if times == 1 else f"{size} ({times} times)"


def _why_no_more_memory(context: FailureContext) -> str:
    """Return which remedies for a lack of memory the job may not use, and why."""
    hint = ""
    if not context.config.allow_cpu_fallback:
        hint = " (allow_cpu_fallback is false)"
    can_halve = context.last.has_batch
    if context.has_smaller and context.settings.refuses(context.smaller):
        hint += "; a smaller micro-batch would change the effective batch size, which is kept"
    if not can_halve:
        is_project = context.config.theirs is not None
        why = _HAS_NO_BATCH if is_project else "the command has no {batch_size}"
        hint += f"; the batch was not halved: {why}"
    if can_halve and context.config.max_retries is not None and context.sizes_not_tried:
        left = ", ".join(map(str, context.sizes_not_tried))
        hint += f"; micro-batch {left} was not tried (max_retries={context.config.retries})"
    if context.keeps_loss:
        hint += f"; no step was split: {context.keeps_loss}"
    if context.keeps_batch:
        hint += f"; the batch was not split: {context.keeps_batch}"
    return hint


def what_came_before(context: FailureContext) -> str:
    """Return the previous attempt's reason, if it differs and no progress came since: the last
    attempt may have failed because of what that attempt left behind."""
    failure = context.failure
    others = [
        attempt for attempt in context.since_progress[:-1] if attempt.message != failure.message
    ]
    # An unknown failure repeats the message of the attempt before, which `why_give_up` already
    # names.
    if not others or others[-1] == context.unknown_before:
        return ""
    before = others[-1]
    if before.kind is failure.kind is not FailureKind.BUG:
        return ""
    return f" (attempt {before.number} before it: {before.message})"


def cannot_work(failure: Failure) -> str:
    """Return one line: CUDA works with no GPU on this machine, and the two ways out."""
    advice = "".join(f"; {sentence}" for sentence in failure.advice)
    return f"CUDA cannot work here: {failure.message}{advice}"
