"""A trainer that takes half the batch has to accumulate, or a line says that it does not."""

import pytest

IN_A_LINE = "but not training.gradient_accumulation_steps=2"


@pytest.mark.parametrize(
    ("trainer", "result", "warnings"),
    [("trains_on_half", 4, 1), ("trains_on_half_and_accumulates", 8, 0)],
)
def test_a_smaller_effective_batch_is_named(world, trainer, result, warnings):
    ended = world.run(
        f"trainer._target_=failing_trainers.{trainer}", "training.batch_size=8", code=0
    )
    assert ended.summary["result"] == result
    assert ended.output.count(IN_A_LINE) == warnings
