"""The memory of live tensors, counted by storage while a program runs, as it would be on a GPU.

Fake tensors on a fake GPU fail in the backward pass without a GPU, and make a CUDA context with
one. So they are on a fake CPU, and this module makes the choices of compute capability 8.0.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from robust_train.compat import FakeTensor, TorchDispatchMode, storage_key, tree_leaves

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, TEMPORARIES, KERNELS = "activations", "temporaries", "kernels"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, KERNELS)

BLOCK_BYTES = 512  # Sizes are multiples of it: `kMinBlockSize` in c10/cuda/CUDACachingAllocator.h

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
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_FLASH_HEAD = 256


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages, real or fake, and remembers the most there were at once.

    Views share a storage, which counts once; it stops counting when its last tensor is gone,
    autograd's saved tensors included. What existed before has to be named with :meth:`label`.
    torch's own ``MemTracker`` needs torch.distributed and cannot count what kernels use. No value
    of a fake tensor is computed: whoever reads one gets a value that no size depends on.

    Args:
        on_cuda: tensors stand for some on a GPU; else what was requested counts.

    Attributes:
        current: bytes that are live now.
        peak: the most that were.
        at_peak: bytes of each category at that moment.
        category: what new storages are taken for.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self.at_peak: Mapping[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.category = TEMPORARIES
        self._on_cuda = on_cuda
        self._block_bytes = BLOCK_BYTES if on_cuda else 1
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._now = dict.fromkeys(CATEGORIES, 0)

    def reset_peak(self) -> None:
        """Let the peak start anew from what is live now."""
        self.peak, self.at_peak = self.current, dict(self._now)

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count ``tensors`` to a category; those that are not known yet begin to count."""
        for tensor in tensors:
            if tensor is None:
                continue
            self._see(tensor)
            key = storage_key(tensor)
            reference, size, before = self._live[key]
            self._live[key] = (reference, size, category)
            self._now[before] -= size
            self._now[category] += size

    @contextmanager
    def taking_for(self, category: str) -> Iterator[None]:
        """Count new storages within the block to this category."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options, aten = kwargs or {}, torch.ops.aten
        reads_value = func in (aten._local_scalar_dense.default, aten.equal.default)
        if reads_value and isinstance(args[0], FakeTensor):
            return func is aten.equal.default or 1.0
        result = func(*args, **options)
        # what a GPU copies to the host by its name, as the trainer does with buffers, is not there
        if self._on_cuda and func is aten._to_copy.default and options.get("device"):
            return result
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                self._see(item)
        if self._on_cuda:
            self._note_peak(_scratch(func, args, result))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        size = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        known = self._live.get(key)
        if known is not None:
            if known[1] != size:  # it was resized
                self._live[key] = (known[0], size, known[2])
                self._count(known[2], size - known[1])
            return
        # the storage's Python object lives as long as the storage itself
        gone = weakref.ref(storage, partial(self._forget, key))
        self._live[key] = (gone, size, self.category)
        self._count(self.category, size)

    def _forget(self, key: int, reference: Any) -> None:
        _, size, category = self._live.pop(key)
        self._count(category, -size)

    def _count(self, category: str, size: int) -> None:
        self.current += size
        self._now[category] += size
        self._note_peak(0)

    def _note_peak(self, scratch: int) -> None:
        if self.current + scratch > self.peak:
            self.peak = self.current + scratch
            self.at_peak = self._now | {KERNELS: scratch}


class AsOnCuda(TorchFunctionMode):
    """Have torch's functions do in this thread what they do on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **options)
        if func is functional.dropout:
            return _dropout(*args, **options)
        if getattr(func, "__name__", "") in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_float32, args))
            options = {key: _float32(item) for key, item in options.items()}
        return func(*args, **options)


def _float32(item: Any) -> Any:
    return item.float() if isinstance(item, Tensor) and item.dtype in _HALF else item


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
    if query.ndim != 4:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )
    if query.dtype in _HALF and attn_mask is None and head <= _LARGEST_FLASH_HEAD:
        scale = 1 / math.sqrt(head) if scale is None else scale
        missing = -head % 8
        if missing:
            query, key, value = (functional.pad(x, (0, missing)) for x in (query, key, value))
        padded: Tensor = ops._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return padded[..., :head] if missing else padded
    if attn_mask is not None:
        # added by the kernel, with rows aligned to 16 elements
        bias = torch.zeros_like(attn_mask) if attn_mask.dtype == torch.bool else attn_mask
        bias = functional.pad(bias.to(query.dtype), (0, -bias.size(-1) % 16))
        attn_mask = bias[..., : key.size(-2)].expand(*query.shape[:3], key.size(2))
    needs_gradient = any(item.requires_grad for item in (query, key, value))
    results = ops._scaled_dot_product_efficient_attention(
        *(query, key, value, attn_mask, needs_gradient and torch.is_grad_enabled()),
        *(dropout_p, is_causal),
        scale=scale,
    )
    return results[0]  # type: ignore[no-any-return]


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
    width = 32 if head <= 128 else 64
    return int(4 * batch * heads * (length + -length % 128) * (head + -head % width + 1))


def _of_convolution(images: Tensor, maps: Tensor) -> int:
    """Count images and results once more: cuDNN's kernels for half precision want channels last and
    convert them in their workspace (NVIDIA's guide to convolutional layers, "tensor layouts")."""
    if images.dtype == torch.float32 or images.is_contiguous(memory_format=torch.channels_last):
        return 0
    return images.nbytes + maps.nbytes
