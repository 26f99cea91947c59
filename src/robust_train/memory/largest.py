"""The largest tensors that are alive, for a person who looks for what fills the memory."""

from __future__ import annotations

from typing import Any

from robust_train.memory import holders


def largest_tensors(top: int = 20) -> list[dict[str, Any]]:
    """The largest live tensors that Python knows, those that share memory counted once.

    What only the autograd graph holds (activations saved for the backward pass) is known to
    Python as little as memory of other libraries.

    Args:
        top: how many at most.

    Returns:
        Largest first: ``bytes``, ``shape``, ``dtype``, ``device``, and ``owner``, who holds it as
        a person would write it. Empty where torch is not loaded.
    """
    tensors = holders.live_tensors()
    sizes = holders.storages(tensors)
    order = sorted(sizes, key=lambda key: -sizes[key])[:top]
    by_storage: dict[holders.StorageKey, Any] = {}
    for tensor in tensors:
        key = holders.storage_of(tensor)
        if key in order:
            by_storage.setdefault(key, tensor)
    chosen = [by_storage.pop(key) for key in order]
    owners = holders.holders_of(chosen, {id(tensors)})
    return [
        {
            "bytes": sizes[key],
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "owner": owner,
        }
        for key, tensor, owner in zip(order, chosen, owners, strict=True)
    ]
