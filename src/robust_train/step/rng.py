"""Saves and restores the states of random generators, in a checkpoint and within a process.

In the process that trains, trainers call :func:`capture_rng` and :func:`restore_rng` for their
checkpoints. A step that is repeated restores its :class:`GeneratorStates`, so that dropout draws
the same numbers again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy if it is imported, and torch on every device."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank so that ranks draw different numbers.

    Rank 0 is not seeded, because its state comes from the checkpoint.
    """
    if rank:
        seed_everything((seed * 1_000_003 + step * 1009 + rank) % 2**63)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of all generators, in types that ``torch.load(weights_only=True)`` accepts.

    The state of the GPU's generator is included if ``device`` is a GPU.
    """
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = list(numpy.random.get_state())
        state["numpy"][1] = state["numpy"][1].tolist()
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the states from `capture_rng`. The GPU's state is restored only on a GPU."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class GeneratorStates:
    """The states of all generators at this moment, to restore within this process.

    The states of all GPUs are included, whichever GPU the model is on. Torch keeps them on the
    host, so reading them creates no CUDA context.

    Args:
        generators: the user's own generators of torch, NumPy or Python.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._states: list[tuple[Any, Callable[[Any], object]]] = [
            *map(_state_and_setter, generators),
            (torch.get_rng_state(), torch.set_rng_state),
            (random.getstate(), random.setstate),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state()
            self._states.append((state, numpy.random.set_state))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            all_gpus = torch.cuda.get_rng_state_all()
            self._states.append((all_gpus, torch.cuda.set_rng_state_all))

    def restore(self) -> None:
        """Restore the states."""
        for state, set_state in self._states:
            set_state(state)

    def equals(self, other: GeneratorStates) -> bool:
        """Return whether no random number was drawn between the two moments."""
        # If CUDA was not initialized at one of the moments, its GPU states are missing.
        pairs = zip(self._states, other._states, strict=False)
        return all(_are_equal(mine, theirs) for (mine, _), (theirs, _) in pairs)


def _are_equal(state: Any, other: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return all(_are_equal(state[key], other[key]) for key in state)
    if isinstance(state, (list, tuple)):
        return all(map(_are_equal, state, other))
    if hasattr(state, "all"):
        return bool((state == other).all())
    return bool(state == other)


def _state_and_setter(generator: Any) -> tuple[Any, Callable[[Any], object]]:
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    # The bit generator holds the state of a NumPy generator.
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return bits.state, partial(setattr, bits, "state")
    return generator.get_state(), generator.set_state


def generators_in(values: Sequence[Any]) -> list[Any]:
    """Return the distinct random generators among ``values``."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    types = {kind for kind in set(map(type, values)) if issubclass(kind, kinds)}
    types.discard(random.SystemRandom)  # It has no state.
    if not types:
        return []
    return list({value for value in values if type(value) in types})
