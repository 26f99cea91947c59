"""Every random generator a training run may draw from: seeded, captured, restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy where something has imported it, and torch on every device."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Have each rank but the first, whose state a checkpoint holds, draw numbers of its own."""
    if rank:
        seed_everything((seed * 1_000_003 + step * 1009 + rank) % 2**63)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return all states in types that ``torch.load(weights_only=True)`` takes."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Invert :func:`capture_rng`; a generator of a device that is absent here is left."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class GeneratorStates:
    """The states at this moment, to go back to within this process. Taken before every optimizer
    step, so nothing is converted. Of all GPUs, whichever the model is on: a generator's state lies
    on the host, and reading it makes no CUDA context."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cuda: list[torch.Tensor] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state_all()

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
