"""What the record of an attempt says of slow training."""

from robust_train.features.slow.record import Slow, SlowNote
from robust_train.model.attempt import Attempt
from robust_train.model.spec import AttemptSpec

SPEC = AttemptSpec((), batch_size=8, gradient_accumulation_steps=1)


def test_the_note_ends_when_training_is_fast_again():
    slow = Attempt(1, SPEC).after(Slow("data", "waits for data", 0.3))
    assert slow.of(SlowNote) == SlowNote("waits for data")
    assert slow.noted("slow", "") == "waits for data"
    assert Attempt.parse(slow.as_json()) == slow
    assert slow.after(Slow()) == Attempt(1, SPEC)


def test_a_notice_has_what_slows_training_down():
    assert Slow("data", "waits for data", 0.3).notice(1).text == " is slow: waits for data"
    assert Slow().notice(1) is None
