"""``robust-train report --cite``: what a paper may say is what the journal has."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from robust_train.model.spec import Knob
from robust_train.report.citation import sentences_of
from robust_train.report.sources import read_sources
from robust_train.report.story import story_of

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def two_attempts():
    """The first of them ran out of memory after six steps."""
    return story_of(read_sources(GOLDEN / "oom_ends_attempts"))


@dataclass(frozen=True)
class SomeKnob(Knob):
    """What features may change of a spec, whichever are there."""

    lr_factor: float = 1.0
    splits_loss: bool = False


def _told(story, *knobs, **changes):
    """The sentences about a story whose second attempt had another spec."""
    first, second = story.attempts
    spec = replace(second.spec, **changes).having(*knobs)
    attempts = (first, replace(second, spec=spec))
    return " ".join(sentences_of(replace(story, attempts=attempts), "1.0"))


def test_a_kept_batch_is_reported_with_its_reason(two_attempts):
    assert sentences_of(two_attempts, "1.0") == [
        "We trained for 12 optimizer steps on 1 × NVIDIA A100-SXM4-40GB with robust-train 1.0.",
        "The effective batch size was 32 throughout, in micro-batches of 32, then 16 with "
        "accumulated gradients.",
        "Training ran out of memory once and resumed from a checkpoint once.",
    ]


def test_ranks_are_no_accumulation():
    """Each has a micro-batch of its own."""
    (_, batch, *_) = sentences_of(story_of(read_sources(GOLDEN / "two_ranks")), "1.0")
    assert batch == (
        "The effective batch size was 64 throughout, in micro-batches of 32 on each of 2 processes."
    )


def test_what_changed_the_result_is_told(two_attempts):
    start = two_attempts.attempts[1].start_step
    told = _told(two_attempts, gradient_accumulation_steps=1)
    assert f"The effective batch size was 32, 16 from step {start} on" in told
    told = _told(two_attempts, SomeKnob(lr_factor=0.5))
    assert f"learning rate was multiplied by 0.5 from step {start} on" in told
    told = _told(two_attempts, SomeKnob(splits_loss=True))
    assert f"From step {start} on, the loss was computed over parts" in told
    told = _told(two_attempts, gpus=())
    assert "on 1 × NVIDIA A100-SXM4-40GB, then on the CPU with" in told


def test_the_command_prints_sentences_and_an_entry(says):
    out = says("report", GOLDEN / "completed", "--cite").out
    assert out.startswith("We trained for 12 optimizer steps on the CPU with robust-train ")
    assert "The batch size was 32 throughout." in out
    assert "@software{robust_train,\n" in out


def test_untrained_jobs_and_sweeps_are_refused(two_attempts, says):
    """The refusal is one line."""
    assert sentences_of(replace(two_attempts, attempts=()), "1.0") == []
    assert "--cite is about one job" in says("report", GOLDEN / "sweep", "--cite", code=2).err
