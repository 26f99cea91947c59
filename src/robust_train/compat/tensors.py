"""Private names of torch about tensors, modules and the execution of operations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any


def preserve_version_counter(torch: Any, tensor: Any) -> AbstractContextManager[None]:
    """Return a context within which changes of ``tensor`` are hidden from autograd's version
    counter."""
    guard: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)
    return guard


def version_of(tensor: Any) -> int:
    """Return how often ``tensor`` was changed in place, or -1 if changes are not counted: for None,
    inference tensors, and tensors of a lazy module in its first pass."""
    try:
        return int(getattr(tensor, "_version", -1))
    except (RuntimeError, ValueError):
        return -1


def versions_of(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Return, for each tensor, its :func:`version_of` and the address of its values. An assignment
    to ``.data`` changes the address only."""
    # A step may have a thousand tensors, and `map` is the fastest loop.
    try:
        places = map(sys.modules["torch"].Tensor.data_ptr, tensors)
        versions = map(attrgetter("_version"), tensors)
        return list(zip(versions, places, strict=True))
    # Sparse tensors, inference tensors, and tensors of a lazy module in its first pass have no
    # address.
    except (RuntimeError, ValueError):
        return [(version_of(tensor), 0) for tensor in tensors]


def tensors_of(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries with a module's own parameters and buffers, by name."""
    return module._parameters, module._buffers


def modules_below(models: Sequence[Any]) -> list[Any]:
    """Return modules and all their submodules, each once. Each step calls this, so it must be fast:
    it takes a quarter of the time of ``Module.modules``."""
    modules = list(dict.fromkeys(models))
    seen = set(modules)
    for module in modules:
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                modules.append(part)
    return modules


def keep_versions(copied: Any, state: Any) -> None:
    """Copy the version numbers of a module's state dict to a copy of the state dict."""
    if hasattr(state, "_metadata"):
        copied._metadata = state._metadata


def copy_at_once(torch: Any, targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy each source into its target, with one kernel. All have the same device and dtype."""
    torch._foreach_copy_(targets, sources)


def depends_on_batch(torch: Any, module: Any) -> bool:
    """Return whether a layer computes statistics over the samples of a pass, like BatchNorm."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def draws_or_iterates(torch: Any, module: Any) -> bool:
    """Return whether a layer in training draws random numbers, or changes its state in each pass,
    like the power iteration of spectral norm."""
    nn = torch.nn
    kinds = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
    if isinstance(module, kinds) or type(module).__name__ == "_SpectralNorm":
        return True
    hooks = module._forward_pre_hooks.values()
    return any(type(hook).__name__ == "SpectralNorm" for hook in hooks)


def has_made(module: Any, name: str) -> bool:
    """Return whether a module has a parameter, a buffer or a module with this name."""
    homes = (module._parameters, module._buffers, module._modules)
    return any(name in home for home in homes)


def without_torch_functions(torch: Any) -> AbstractContextManager[object]:
    """Return a context within which no TorchFunctionMode sees the operations."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return context


def runs_eagerly(torch: Any) -> AbstractContextManager[object]:
    """Return a context within which compiled modules run uncompiled.

    ``torch.compiler.set_stance`` exists from torch 2.6 on; an older torch compiles. If dynamo was
    not imported, no module was compiled, and importing it would take seconds and memory.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = set_stance("force_eager")
    return stance
