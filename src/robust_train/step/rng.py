"""The states of random generators: to go back to, and in a checkpoint."""

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
    """Seed each rank except the first, whose state a checkpoint holds, so that ranks draw different
    numbers."""
    if rank:
        seed_everything((seed * 1_000_003 + step * 1009 + rank) % 2**63)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states in types that ``torch.load(weights_only=True)`` takes, including the GPU's
    if ``device`` is a GPU."""
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
    """Restore the states of `capture_rng`, except those of a device that is absent here."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class GeneratorStates:
    """The states at this moment, to go back to within this process. Of all GPUs, whichever the
    model is on: a generator's state lies on the host, and reading it makes no CUDA context.
    ``generators`` are the user's own generators of torch, NumPy or Python."""

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
        """Set the generators back."""
        for state, set_state in self._states:
            set_state(state)

    def equal(self, other: GeneratorStates) -> bool:
        """Return whether no random number was drawn between the two moments."""
        pairs = zip(self._states, other._states, strict=False)
        return all(_are_equal(state, at) for (state, _), (at, _) in pairs)


def _are_equal(state: Any, other: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict):
        return all(_are_equal(state[key], other[key]) for key in state)
    if isinstance(state, (list, tuple)):
        return all(map(_are_equal, state, other))
    return bool((state == other).all()) if hasattr(state, "all") else state == other


def _state_and_setter(generator: Any) -> tuple[Any, Callable[[Any], object]]:
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    # what a generator of NumPy's draws from
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        return bits.state, partial(setattr, bits, "state")
    return generator.get_state(), generator.set_state


def generators_in(values: Sequence[Any]) -> list[Any]:
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    types = {kind for kind in set(map(type, values)) if issubclass(kind, kinds)}
    types.discard(random.SystemRandom)  # the system's has no state
    if not types:
        return []
    return list({value for value in values if type(value) in types})
