"""Where CUDA differs from the CPU in how much memory a step takes.

Fake tensors on a fake GPU fail in the backward pass without a GPU, and make a CUDA context with
one. So they are on a fake CPU, and this module makes the choices of compute capability 8.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from robust_train.planning.tracker import StorageTracker

BLOCK_BYTES = 512
"""Sizes are multiples of it: ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h."""

# "CUDA Ops that can autocast to float32" in torch's documentation of amp, as far as images need
# them; the CPU's autocast computes them in the format that their input has
# fmt: off
_IN_FLOAT32 = frozenset((
    "layer_norm", "group_norm", "softmax", "softmin", "log_softmax", "cross_entropy", "nll_loss",
    "cosine_similarity", "normalize", "norm", "pow", "__pow__", "exp", "expm1", "log", "log1p",
    "log2", "log10", "rsqrt", "reciprocal", "softplus", "cumsum", "cumprod", "prod", "mse_loss",
    "l1_loss", "smooth_l1_loss", "kl_div", "dist", "cdist", "renorm",
))
# fmt: on
_FLASH_ROUNDS_LENGTH_TO = 128
_LARGEST_FLASH_HEAD = 256


class AsOnCuda(TorchFunctionMode):
    """Have torch's functions do in this thread what they do on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **options)
        if func is functional.dropout:
            return _dropout(*args, **options)
        if name in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_float32(item) for item in args)
            options = {key: _float32(item) for key, item in options.items()}
        return func(*args, **options)


class FakeTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Counts what fake tensors on the CPU stand for: with ``on_cuda`` tensors on a GPU.

    No value is computed, so whoever reads one gets a value that no size depends on.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        super().__init__(
            block_bytes=BLOCK_BYTES if on_cuda else 1, scratch=_scratch if on_cuda else None
        )
        self._on_cuda = on_cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is torch.ops.aten.equal.default:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)

    def counts(self, operation: Any, options: Mapping[str, Any]) -> bool:
        # what a GPU copies to the host by its name, as the trainer does with buffers, is not there
        is_copy = operation is torch.ops.aten._to_copy.default and options.get("device")
        return not (self._on_cuda and is_copy)


def _float32(item: Any) -> Any:
    is_half = isinstance(item, Tensor) and item.dtype in (torch.bfloat16, torch.float16)
    return item.float() if is_half else item


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Call the kernel that keeps its mask as bytes; the CPU's mask is as large as the input."""
    if not training or not 0 < p < 1 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that a GPU would take: FlashAttention for half precision without a mask, else
    the memory-efficient one. Neither makes the matrix of length × length.

    The order is that of ``sdp::priority_order`` in torch's sdp_utils.cpp; cuDNN's kernel, which may
    go first on Hopper, keeps as much as FlashAttention.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (item.to(dtype) for item in (query, key, value))
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    ops, head = torch.ops.aten, query.size(-1)
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if is_half and attn_mask is None and head <= _LARGEST_FLASH_HEAD and query.ndim == 4:
        scale = 1 / math.sqrt(head) if scale is None else scale
        missing = -head % 8
        if missing:
            query, key, value = (functional.pad(x, (0, missing)) for x in (query, key, value))
        padded: Tensor = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return padded[..., :head] if missing else padded
    if query.ndim != 4:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query, key)
    needs_gradient = torch.is_grad_enabled() and any(
        item.requires_grad for item in (query, key, value)
    )
    results = ops._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )
    return results[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the kernel takes it: added, expanded, its rows aligned to 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    mask = mask.to(query.dtype)
    missing = -mask.size(-1) % 16
    if missing:
        mask = functional.pad(mask, (0, missing))[..., : key.size(-2)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _scratch(operation: Any, arguments: tuple[Any, ...], result: Any) -> int:
    """Return what CUDA's kernels allocate beside their results, and release at their end."""
    ops = torch.ops.aten
    if operation is ops._scaled_dot_product_flash_attention_backward.default:
        return _of_flash_backward(arguments[1])
    if operation is ops.convolution.default:
        return _of_convolution(arguments[0], result)
    if operation is ops.convolution_backward.default:
        return _of_convolution(arguments[1], arguments[0])
    return 0


def _of_flash_backward(query_BHLE: Tensor) -> int:
    """Count sums in float32 of the query's gradient and the softmax: ``dq_accum`` and ``softmax_d``
    of ``mha_bwd`` in flash_attn/flash_api.cpp."""
    batch, heads, length, head = query_BHLE.shape
    rows = -(-length // _FLASH_ROUNDS_LENGTH_TO) * _FLASH_ROUNDS_LENGTH_TO
    columns = -(-head // 32) * 32 if head <= 128 else -(-head // 64) * 64
    return int(4 * batch * heads * rows * (columns + 1))


def _of_convolution(images: Tensor, maps: Tensor) -> int:
    """Count images and results once more: cuDNN's kernels for half precision want channels last and
    convert them in their workspace (NVIDIA's guide to convolutional layers, "tensor layouts")."""
    if images.dtype == torch.float32 or images.is_contiguous(memory_format=torch.channels_last):
        return 0
    return images.numel() * images.element_size() + maps.numel() * maps.element_size()
