"""How far `robust-train plan` is off: predicted peaks of the built-in models beside measured ones.

Each model does real steps with random weights and images, and the most memory that its tensors took
is compared with the prediction. On a GPU that is torch.cuda.max_memory_allocated, with the
backbones of the configs; on the CPU what torch's profiler has seen allocated, with small ones, and
the prediction is one for the CPU.

Run: python benchmarks/plan_accuracy.py [--device cuda|cpu] [--batch-sizes 8,32,128]
Without a GPU, and without --device, the CPU's part is run and the GPU's is said to be skipped.
Goal: at most 10 % off on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "planning"))

import torch
from real_steps import RealSteps
from training_config import config

from robust_train.planning.fit import WORKSPACE_BYTES
from robust_train.planning.prediction import StepPredictor
from robust_train.values import MIB

FLOWERS = ("dataset=flowers102", "model.pretrained=false")
JOBS = {
    "cuda": {
        "cnn, digits": ("model=cnn",),
        "cnn, 64 pixels": ("model=cnn", "dataset=flowers102"),
        "linear_probe": ("model=linear_probe", *FLOWERS),
        "lora": ("model=lora", *FLOWERS),
        "lora, float32": ("model=lora", *FLOWERS, "training.mixed_precision=false"),
        "full_finetune": ("model=full_finetune", *FLOWERS),
        "full_finetune, gradient checkpointing": (
            *("model=full_finetune", *FLOWERS, "training.gradient_checkpointing=true"),
        ),
        "full_finetune, resnet50": ("model=full_finetune", *FLOWERS, "model.backbone=resnet50"),
        "full_finetune, swin_tiny": (
            *("model=full_finetune", *FLOWERS),
            "model.backbone=swin_tiny_patch4_window7_224",
        ),
    }
}
SMALL = (*FLOWERS, "model.image_size=96")
TINY = (*SMALL, "model.backbone=vit_tiny_patch16_224")
JOBS["cpu"] = {
    "cnn, digits": ("model=cnn",),
    "cnn, 64 pixels": ("model=cnn", "dataset=flowers102"),
    "linear_probe, vit_tiny": ("model=linear_probe", *TINY),
    "linear_probe, test_resnet": ("model=linear_probe", *SMALL, "model.backbone=test_resnet"),
    "lora, vit_tiny": ("model=lora", *TINY),
    "full_finetune, vit_tiny": ("model=full_finetune", *TINY),
    "full_finetune, vit_tiny, gradient checkpointing": (
        *("model=full_finetune", *TINY, "training.gradient_checkpointing=true"),
    ),
    "full_finetune, test_resnet": ("model=full_finetune", *SMALL, "model.backbone=test_resnet"),
}


def compare(device: str, batch_sizes: list[int], only: list[str] | None) -> list[float]:
    """Print a table; returns the errors in percent, signs dropped."""
    beside = WORKSPACE_BYTES if device == "cuda" else 0
    print("| job | batch | predicted MiB | measured MiB | error |")
    print("| --- | --- | --- | --- | --- |")
    errors = []
    for name in (name for name in JOBS[device] if not only or name in only):
        cfg = config(*JOBS[device][name])
        predictor, real = StepPredictor(cfg, device), RealSteps(cfg, device)
        for size in batch_sizes:
            predicted = predictor.predict(size).tensors_bytes + beside
            measured = real.peak_bytes(size)
            error = 100 * (predicted / measured - 1)
            errors.append(abs(error))
            sizes = f"{predicted / MIB:.1f} | {measured / MIB:.1f}"
            print(f"| {name} | {size} | {sizes} | {error:+.2f} % |", flush=True)
        del real
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    mean = sum(errors) / len(errors)
    print(f"\n{device}: mean error {mean:.2f} %, largest {max(errors):.2f} %")
    return errors


def main() -> None:
    """Compare on the devices there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--batch-sizes", default="8,32,128")
    parser.add_argument("--only", nargs="+", choices=[*JOBS["cpu"], *JOBS["cuda"]], metavar="JOB")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    has_gpu = torch.cuda.is_available()
    if arguments.device != "cpu" and not has_gpu:
        print("on a GPU: skipped, torch sees none here")
        if arguments.device == "cuda":
            sys.exit(1)
    for device in [arguments.device] if arguments.device else ["cuda", "cpu"]:
        if device == "cpu" or has_gpu:
            compare(device, sizes, arguments.only)


if __name__ == "__main__":
    main()
