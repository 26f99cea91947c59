"""Training loops as users write them, on the CPU and under real limits of memory."""

import os
import warnings

import torch
from torch.utils.checkpoint import checkpoint

from memory_limit import MIB, limit_growth, limited_growth

_BLOCKS = 8
_LAYERS = 4


def built_in(cfg, run):
    """The built-in trainer, with so much private memory to grow into and no more."""
    from robust_train.vision.trainer import train

    limit_growth(int(os.environ["DATA_LIMIT_BYTES"]))
    return train(cfg, run)


def checkpoints_within_a_limit(cfg, run):
    """Heed ``cfg.training.gradient_checkpointing``: each layer keeps 4 MiB of activations, 128 MiB
    in all, 48 with checkpointing."""
    torch.set_num_threads(1)
    is_on = bool(cfg.training.gradient_checkpointing)
    run.started(0)
    _gradient(1, is_on)  # what the first pass of all takes
    with limited_growth(90 * MIB):
        short = _gradient(cfg.training.batch_size, is_on)
    run.progress(1)
    at_ease = _gradient(cfg.training.batch_size, not is_on)
    return {"short_of_memory": short, "at_ease": at_ease, "checkpointed": is_on}


def _gradient(batch_size: int, is_on: bool) -> list[float]:
    scales = torch.linspace(0.5, 1.5, _BLOCKS * _LAYERS, requires_grad=True)
    x = torch.linspace(-1, 1, batch_size << 17).reshape(batch_size, -1)

    def block(x, number):
        for scale in scales[number * _LAYERS : (number + 1) * _LAYERS]:
            x = torch.tanh(x * scale)
        return x

    for number in range(_BLOCKS):
        x = checkpoint(block, x, number, use_reentrant=False) if is_on else block(x, number)
    x.mean().backward()
    return scales.grad.tolist()


def built_in_on_a_simulated_gpu(cfg, run):
    """The built-in trainer on a GPU that fits ``cfg.fits`` samples of a training step.

    It computes on the host. The model is tiny, so a byte of it stands for 32 KiB of the GPU's.
    """
    from cuda_on_the_cpu import cuda_on_the_cpu
    from robust_train.vision.trainer import train

    def run_out(module, inputs):
        if not (isinstance(module, torch.nn.Conv2d) and module.training):
            return
        samples = len(inputs[0])
        if samples > cfg.fits:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {samples / 64:.2f} GiB. GPU 0 has a total "
                "capacity of 39.38 GiB of which 2.31 GiB is free. Including non-PyTorch memory, "
                "this process has 30.02 GiB memory in use. Of the allocated memory 29.04 GiB is "
                "allocated by PyTorch, and 0.21 GiB is reserved by PyTorch but unallocated."
            )

    warnings.filterwarnings("ignore", "'pin_memory' argument is set")
    hook = torch.nn.modules.module.register_module_forward_pre_hook(run_out)
    try:
        with cuda_on_the_cpu() as gpu:
            allocated = gpu.allocated
            gpu.allocated = lambda: allocated() << 15
            return train(cfg, run)
    finally:
        hook.remove()
