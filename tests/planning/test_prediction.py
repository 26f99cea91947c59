"""Fake steps of the built-in trainer, beside real ones."""

from __future__ import annotations

import pytest
import torch
from real_steps import RealSteps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from training_config import config

from robust_train.planning.prediction import StepPredictor
from robust_train.planning.tracker import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    AsOnCuda,
    StorageTracker,
)

TINY = ("dataset=flowers102", "model.backbone=test_vit", "model.pretrained=false")
SMALL = (*TINY, "model.image_size=32")

# oneDNN turns weights and maps round in memory of its own; how much depends on the processor
OF_CONVOLUTIONS = 0.25


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        (("model=cnn",), OF_CONVOLUTIONS),
        (("model=lora", *SMALL), 0.01),
        pytest.param(("model=linear_probe", *SMALL), 0.01, marks=pytest.mark.slow),
        pytest.param(("model=full_finetune", *SMALL), 0.01, marks=pytest.mark.slow),
        pytest.param(
            ("model=lora", *SMALL, "training.gradient_checkpointing=true"),
            0.03,
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: "-".join(v.split("=")[1] for v in value) if isinstance(value, tuple) else "",
)
def test_a_fake_step_on_the_cpu_takes_what_a_real_one_does(
    overrides: tuple[str, ...], tolerance: float
) -> None:
    cfg = config(*overrides)
    fake, real = StepPredictor(cfg, "cpu"), RealSteps(cfg, "cpu")
    for accumulates in (False, True):
        predicted = fake.predict(48, accumulates=accumulates).tensors_bytes
        measured = real.peak_bytes(48, accumulates=accumulates)
        assert predicted == pytest.approx(measured, rel=tolerance)


@pytest.fixture(scope="module")
def lora() -> StepPredictor:
    """With pretrained weights and a data set, neither of which is here."""
    hub = pytest.MonkeyPatch()
    hub.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    backbone = ("model.backbone=test_vit", "model.image_size=32", "model.pretrained=true")
    steps = StepPredictor(config("model=lora", *backbone, "dataset=cub200", "dataset.root=/no"))
    hub.undo()
    return steps


@pytest.fixture(scope="module")
def cnn() -> StepPredictor:
    return StepPredictor(config("model=cnn"))


@pytest.mark.parametrize("model", ["cnn", pytest.param("lora", marks=pytest.mark.slow)])
def test_more_samples_take_more_and_memory_is_near_affine_in_them(
    request: pytest.FixtureRequest, model: str
) -> None:
    steps = request.getfixturevalue(model)
    small, middle, large = (steps.predict(size).tensors_bytes for size in (32, 64, 128))
    assert small < middle < large
    assert middle == pytest.approx(large - (middle - small) * 2, rel=0.02)
    assert steps.predict(32).tensors_bytes == small, "a prediction changes none that follows"


def test_weights_gradients_and_optimizer_are_what_the_parameters_say() -> None:
    cfg = config("model=full_finetune", *SMALL)
    peak = StepPredictor(cfg).predict(4, accumulates=True)
    trained = sum(-(-p.numel() * 4 // 512) * 512 for p in RealSteps(cfg, "cpu").model.parameters())
    assert peak.parts[WEIGHTS] == trained
    assert peak.parts[GRADIENTS] == trained
    assert peak.parts[OPTIMIZER] == 2 * trained


def test_a_frozen_backbone_has_neither_gradients_nor_states(lora: StepPredictor) -> None:
    parts = lora.predict(64, accumulates=True).parts
    assert 0 < parts[GRADIENTS] < 0.1 * parts[WEIGHTS]
    assert parts[OPTIMIZER] == pytest.approx(2 * parts[GRADIENTS], rel=0.01)


def test_what_saves_memory_is_seen_to_save_it() -> None:
    def bytes_with(*overrides: str) -> int:
        cfg = config("model=full_finetune", *SMALL, *overrides)
        return StepPredictor(cfg).predict(256).tensors_bytes

    usual = bytes_with()
    assert bytes_with("training.gradient_checkpointing=true") < 0.7 * usual
    assert bytes_with("training.mixed_precision=false") > usual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_never_makes_the_matrix_of_length_by_length(dtype: torch.dtype) -> None:
    heads, length, head = 4, 1024, 64
    with FakeTensorMode(), StorageTracker(on_cuda=True) as tracker, AsOnCuda():
        x = torch.empty(1, heads, length, head, dtype=dtype, requires_grad=True)
        functional.scaled_dot_product_attention(x, x, x).sum().backward()
    assert tracker.peak < heads * length * length * x.element_size()
    assert x.grad is not None


def test_under_autocast_norms_are_in_float32_on_a_gpu_and_masks_of_dropout_are_bytes() -> None:
    with FakeTensorMode(), StorageTracker(on_cuda=True) as tracker, AsOnCuda():
        x = torch.empty(64, 512, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = functional.linear(x, torch.empty(512, 512))
            assert half.dtype is torch.bfloat16
            assert functional.layer_norm(half, (512,)).dtype is torch.float32
            before = tracker.current
            dropped = functional.dropout(half, 0.1)
            assert tracker.current - before == dropped.numel() * (2 + 1)


def test_a_convolution_in_half_precision_turns_its_images_round_on_a_gpu() -> None:
    with FakeTensorMode(), StorageTracker(on_cuda=True) as tracker, AsOnCuda():
        images = torch.empty(2, 8, 32, 32, dtype=torch.bfloat16)
        kernel = torch.empty(8, 8, 3, 3, dtype=torch.bfloat16)
        turned = images.to(memory_format=torch.channels_last)
        for given, times in ((images, 3), (turned, 1)):
            tracker.reset_peak()
            before = tracker.current
            functional.conv2d(given, kernel, padding=1)
            # the result; images and result once more in cuDNN's workspace
            assert tracker.peak - before == times * images.numel() * 2
