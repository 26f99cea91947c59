"""Writes sentences for a paper: how a job was trained, and what robust-train changed in it.

The command ``robust-train report --cite`` calls `sentences_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from robust_train.report.facts import OOM, Story
from robust_train.report.sources import TimedAttempt

BIBTEX = """\
@software{{robust_train,
  title = {{robust-train}},
  author = {{{{The robust-train authors}}}},
  version = {{{version}}},
}}"""


def sentences_of(story: Story, version: str) -> list[str]:
    """Return sentences about a job. The list is empty if no attempt made a step."""
    trained = [
        attempt for attempt in story.attempts if (attempt.end_step or 0) > attempt.start_step
    ]
    if not trained:
        return []
    sentences = [
        f"We trained {_describe_length(trained)}{_describe_devices(trained)} with robust-train "
        f"{version}{_describe_libraries(story)}.",
        _describe_batch(trained),
        _describe_split_loss(trained),
        _describe_learning_rate(trained),
        _describe_skipped_updates(trained),
        _describe_interruptions(story),
    ]
    return [sentence for sentence in sentences if sentence]


def _describe_length(trained: Sequence[TimedAttempt]) -> str:
    steps = trained[-1].end_step or 0
    ending = "" if steps == 1 else "s"
    return f"for {steps:,} optimizer step{ending}"


def _describe_devices(trained: Sequence[TimedAttempt]) -> str:
    names = []
    for attempt in trained:
        counts = Counter(gpu.name for gpu in attempt.spec.gpus)
        devices = " and ".join(f"{number} × {name}" for name, number in counts.items())
        names.append(devices or "the CPU")
    return " on " + ", then on ".join(name for name, _ in groupby(names))


_LIBRARIES = (("torch", "PyTorch"), ("cuda", "CUDA"))  # keys of `Story.about` and their names


def _describe_libraries(story: Story) -> str:
    versions = [f"{label} {story.about[key]}" for key, label in _LIBRARIES if story.about.get(key)]
    return f" ({', '.join(versions)})" if versions else ""


def _describe_batch(trained: Sequence[TimedAttempt]) -> str:
    """Return a sentence with the effective batch size and its micro-batches."""
    if not all(attempt.spec.has_batch for attempt in trained):
        return "The script chose its batch size itself."
    if not all(attempt.spec.accumulates for attempt in trained):
        sizes = _each(attempt.spec.batch_size * attempt.spec.ranks for attempt in trained)
        return f"The batch size was {sizes}, times the script's own gradient accumulation."
    effective = [attempt.spec.effective_batch_size for attempt in trained]
    micro = _each(size for attempt in trained for size in attempt.sizes)
    if len(set(effective)) == 1 and micro == str(effective[0]):
        return f"The batch size was {effective[0]} throughout."
    ranks = [attempt.spec.ranks for attempt in trained]
    if max(ranks) > 1:
        micro += f" on each of {_each(ranks)} processes"
    if len(set(effective)) == 1:
        accumulates = any(
            size * attempt.spec.ranks < effective[0]
            for attempt in trained
            for size in attempt.sizes
        )
        text = (
            f"The effective batch size was {effective[0]} throughout, in micro-batches of {micro}"
        )
        if accumulates:
            text += " with accumulated gradients"
        return f"{text}."
    changes = [f"{effective[0]}"]
    for before, after in pairwise(trained):
        if before.spec.effective_batch_size != after.spec.effective_batch_size:
            changes.append(f"{after.spec.effective_batch_size} from step {after.start_step} on")
    return f"The effective batch size was {', '.join(changes)}, in micro-batches of {micro}."


def _each(values: Iterable[object]) -> str:
    """Return consecutive different values, such as ``64, then 32``."""
    return ", then ".join(str(value) for value, _ in groupby(values))


def _describe_split_loss(trained: Sequence[TimedAttempt]) -> str:
    for attempt in trained:
        if attempt.spec.noted("splits_loss", False):
            return (
                f"From step {attempt.start_step} on, the loss was computed over parts of a batch, "
                "whose gradients differ from the gradients of the whole batch."
            )
    return ""


def _describe_learning_rate(trained: Sequence[TimedAttempt]) -> str:
    factors = [(attempt, attempt.spec.noted("lr_factor", 1.0)) for attempt in trained]
    changed = [(attempt, factor) for attempt, factor in factors if factor != 1]
    if not changed:
        return ""
    first, _ = changed[0]
    lower = _each(f"{factor:g}" for _, factor in changed)
    return (
        f"After divergence, the learning rate was multiplied by {lower} from step "
        f"{first.start_step} on."
    )


def _describe_skipped_updates(trained: Sequence[TimedAttempt]) -> str:
    number = sum(attempt.noted("skipped_updates", 0) for attempt in trained)
    if not number:
        return ""
    return f"Updates left out because their gradient was not finite: {number}."


def _describe_interruptions(story: Story) -> str:
    """Return a sentence about how often memory ran out and how often training resumed."""
    memory = sum(attempt.outcome in OOM for attempt in story.attempts)
    resumed = sum(attempt.start_step > 0 for attempt in story.attempts)
    parts = []
    if memory:
        parts.append(f"ran out of memory {_times(memory)}")
    if resumed:
        parts.append(f"resumed from a checkpoint {_times(resumed)}")
    return f"Training {' and '.join(parts)}." if parts else ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
