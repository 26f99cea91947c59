"""Writes the reason why a job gives up: what failed, and what was tried.

:func:`.decide.decide` calls `why_give_up` in the launcher if no rule returns a decision. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from robust_train.model.failure import Clue, Failure, FailureKind
from robust_train.policy.context import FailureContext

_HAS_NO_BATCH = (
    "the project's config has no known key for the batch size of training; set "
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
        return describe_setup_failure(context.failure)
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
    hints = _remedies_not_allowed(context)
    return f"out of memory on every device that may be used: {tried}{hints}"


def describe_setup_failure(failure: Failure) -> str:
    """Return a line that says why CUDA works with no GPU of this machine, and what to do."""
    advice = "".join(f"; {sentence}" for sentence in failure.advice)
    return f"CUDA cannot work here: {failure.message}{advice}"


def _why_a_bug(context: FailureContext) -> str:
    """Return the failure's message, and the reason why the program is to blame for a failure of
    unknown origin."""
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
        f"{message}: twice at the same place, with no later checkpoint in between, so the "
        f"program is to blame{first}"
    )


def _what_was_tried(context: FailureContext) -> str:
    """Return the devices, each with the micro-batches of its attempts, for a sentence."""
    sizes_on: dict[str, list[str]] = {}
    for attempt in context.history:
        sizes = sizes_on.setdefault(attempt.spec.device, [])
        if attempt.spec.has_batch:
            sizes.append(" down to ".join(map(str, attempt.sizes)))
    tried: list[str] = []
    for device, sizes in sizes_on.items():
        if sizes:
            tried.append(f"{device} at micro-batch {', '.join(_count_repeated(sizes))}")
        else:
            tried.append(device)
    return "; ".join(tried)


def _count_repeated(sizes: Sequence[str]) -> Iterator[str]:
    """Yield each size once, with the number of tries in a row."""
    for size, group in itertools.groupby(sizes):
        times = len(list(group))
        yield size if times == 1 else f"{size} ({times} times)"


def _remedies_not_allowed(context: FailureContext) -> str:
    """Return the remedies for a lack of memory that the job was not allowed to use, and why."""
    config = context.config
    hints = ""
    if not config.allow_cpu_fallback:
        hints = " (allow_cpu_fallback is false)"
    if context.has_smaller and context.settings.refuses(context.smaller):
        hints += "; a smaller micro-batch would change the effective batch size, which is kept"
    if not context.last.has_batch:
        is_project = config.theirs is not None
        why = _HAS_NO_BATCH if is_project else "the command has no {batch_size}"
        hints += f"; the batch was not halved: {why}"
    elif config.max_retries is not None and context.sizes_not_tried:
        left = ", ".join(map(str, context.sizes_not_tried))
        hints += f"; micro-batch {left} was not tried (max_retries={config.retries})"
    if context.keeps_loss:
        hints += f"; no step was split: {context.keeps_loss}"
    if context.keeps_batch:
        hints += f"; the batch was not split: {context.keeps_batch}"
    return hints


def describe_previous_failure(context: FailureContext) -> str:
    """Return the reason of an earlier attempt in brackets, if it may have caused the last failure.

    That is the case if the attempt failed in another way and no progress was made since: the last
    attempt may have failed because of the state that it left behind. Empty otherwise.
    """
    failure = context.failure
    others = [
        attempt for attempt in context.since_progress[:-1] if attempt.message != failure.message
    ]
    # For an unknown failure, `why_give_up` already contains the earlier message.
    if not others or others[-1] == context.unknown_before:
        return ""
    earlier = others[-1]
    if earlier.kind is failure.kind and failure.kind is not FailureKind.BUG:
        return ""
    return f" (attempt {earlier.number} before it: {earlier.message})"
