"""The built-in trainer's code for a GPU, from start to resumption, on a stand-in for one."""

import pytest
import torch
from hydra import compose, initialize_config_module
from training_world import WatchedRun

from cuda_on_the_cpu import cuda_on_the_cpu
from robust_train.attempt.run import live_of
from robust_train.attempt.runner import call_trainer
from robust_train.config.checks import checked
from robust_train.features.memory_upkeep.attempt import MemoryUpkeep
from robust_train.model.errors import TrainingStopped
from robust_train.vision.trainer import train
from taking_part import hooked

OVERRIDES = (
    *("device=cuda:0", "dataset=digits", "training.epochs=1", "training.batch_size=256"),
    *("training.num_workers=0", "training.mixed_precision=true"),
    "memory.empty_cache_frequency=1",
    "training.gradient_checkpointing=false",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_the_built_in_trainer_works_on_a_gpu(tmp_path, caplog):
    """All its ways are taken on a stand-in."""
    with initialize_config_module("robust_train.configs", version_base="1.3"):
        cfg = compose("robust", overrides=[*OVERRIDES])
    caplog.set_level("INFO")
    with cuda_on_the_cpu() as gpu:
        first = WatchedRun(tmp_path, stop_at_step=3)
        hooked(first, MemoryUpkeep, checked(cfg))
        with pytest.raises(TrainingStopped):
            call_trainer(train, cfg, checked(cfg), first)
        # The second run may replace this checkpoint by newer ones, if it takes long.
        saved = torch.load(first.last_checkpoint, weights_only=True)
        second = WatchedRun(tmp_path, resume=first.last_checkpoint)
        hooked(second, MemoryUpkeep, checked(cfg))
        result = call_trainer(train, cfg, checked(cfg), second)
    assert result["steps"] == 6
    assert 0 < gpu.fraction < 1, "memory.fraction"
    assert "cuda" in saved["rng"]
    live_of(second).speed.send()
    assert second.of("speed")
