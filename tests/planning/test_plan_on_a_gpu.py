"""Predictions beside what a real GPU's allocator has measured; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from real_steps import RealSteps
from training_config import config

from robust_train.planning.fit import WORKSPACE_BYTES
from robust_train.planning.prediction import StepPredictor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and CUDA"),
]

FLOWERS = ("dataset=flowers102", "model.pretrained=false")


@pytest.mark.parametrize("model", ["linear_probe", "lora", "full_finetune"])
def test_predicted_peaks_are_near_those_of_the_gpu(model: str) -> None:
    cfg = config(f"model={model}", *FLOWERS)
    predictor, real = StepPredictor(cfg), RealSteps(cfg, "cuda")
    for size in (16, 64):
        predicted = predictor.predict(size).tensors_bytes + WORKSPACE_BYTES
        assert predicted == pytest.approx(real.peak_bytes(size), rel=0.15)


def test_planning_starts_no_cuda() -> None:
    was_started = torch.cuda.is_initialized()
    StepPredictor(config("model=lora", *FLOWERS)).predict(4)
    assert torch.cuda.is_initialized() == was_started
