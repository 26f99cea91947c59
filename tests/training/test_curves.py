"""Where the built-in trainer draws: for TensorBoard, or nowhere."""

import pytest


@pytest.mark.parametrize(
    ("logger", "line"),
    [("tensorbord", "did you mean tensorboard?"), ("wandb", "")],
)
def test_a_logger_that_does_not_exist_is_refused(logger, line, world):
    world.run(f"logger={logger}").was_refused([f"logger={logger}: {line}", "tensorboard"])
