"""Release the memory of a failed try before the next one, and check that it is gone.

Imports no torch: where it is not loaded there are no tensors to care about.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from robust_train.compat import clear_cublas_workspaces
from robust_train.memory import holders
from robust_train.memory.holders import started_torch
from robust_train.memory.segments import has_private_pools, memory_segments
from robust_train.readable import first_line
from robust_train.values import MIB

log = logging.getLogger("robust_train")

_TOLERATED_SHARE = 0.01
# below this lie generators' states, counters and the like, which no next try will miss
_TOLERATED_BYTES = 64 * 1024
_TOP = 3


def release_memory(error: BaseException, *, thorough: bool = True) -> None:
    """Release everything that a failed try still holds in this process.

    Whoever keeps the exception (a logger, a Future, tenacity's retry state) keeps its traceback,
    the traceback keeps the frames, and their variables keep every tensor of the failed pass. So
    the frames are emptied, whoever keeps them. An optimizer whose first step ran out of memory
    loses its half-made state.

    Call it outside of the failed function, as soon as it has failed. Frames that still run, among
    them the caller's own, cannot be emptied.
    """
    optimizers = _optimizers_in_their_first_step(error)
    clear_frames(error)
    for optimizer in optimizers:
        optimizer.state.clear()
    return_memory(thorough=thorough, workspaces=True)


def clear_frames(error: BaseException) -> None:
    """Empty the frames in the traceback of ``error`` and of all that it was raised from."""
    for current in _with_causes(error):
        for frame, _ in traceback.walk_tb(current.__traceback__):
            try:
                frame.clear()
            except RuntimeError:
                continue  # it still runs
            # a debugger may have left a copy of the variables there; this updates it, to nothing
            _ = frame.f_locals


def return_memory(*, thorough: bool = True, workspaces: bool = False) -> None:
    """Collect garbage, and return unused memory to the device and to the system.

    Args:
        thorough: look through all objects; else only through young ones, as those of a pass that
            has just failed are, in a tenth of the time beside a process full of libraries.
        workspaces: return cuBLAS's as well, unless a CUDA graph was captured, which embeds their
            addresses. Never between steps that go well.
    """
    gc.collect() if thorough else gc.collect(1)
    torch = started_torch()
    if torch is not None:
        try:
            if workspaces and has_private_pools(memory_segments(torch)) is False:
                clear_cublas_workspaces(torch)
            # what other processes have released becomes cache, which the next call returns
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        except RuntimeError as error:  # it synchronises, so it shows what else went wrong
            log.warning("cannot empty the CUDA cache: %s", first_line(error))
    trim = _malloc_trim()
    if trim is not None:
        # a cgroup counts freed pages that the C library keeps for later
        trim(0)


class KeptGradients:
    """Gradients as they are now, to go back to after a failed try: the same tensors and values.

    A try may add to a gradient or set it to zero, so its values are copied; on the host where the
    device has no room for that.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._kept = {
            id(tensor): (weakref.ref(tensor), gradient, _copied(gradient))
            for tensor in tensors
            if (gradient := _gradient(tensor)) is not None
        }

    def restore(self) -> None:
        """Drop gradients that were not there, and give the others their values back."""
        for tensor in leaf_tensors():
            if tensor.grad is not None and not self._knows(tensor):
                tensor.grad = None
        for reference, gradient, values in self._kept.values():
            tensor = reference()
            if tensor is not None:
                gradient.data.copy_(values)
                tensor.grad = gradient

    def _knows(self, tensor: Any) -> bool:
        kept = self._kept.get(id(tensor))
        return kept is not None and kept[0]() is tensor


def leaf_tensors() -> list[Any]:
    """Return every tensor that a backward pass may give a gradient."""
    return [t for t in holders.live_tensors() if t.is_leaf and t.requires_grad]


@dataclass(frozen=True)
class StartingMemory:
    """What tensors held before the first try, to compare with before each later one.

    On a GPU as the caching allocator counts, on the CPU as the storages of all tensors that Python
    knows; taking it is one pass over Python's objects, some ten milliseconds.

    Attributes:
        bytes_on: bytes by device, ``cpu`` or ``cuda:0``.
        storages: the CPU's and GPUs' storages at that moment.
        gradients: of that moment.
    """

    bytes_on: Mapping[str, int]
    storages: frozenset[holders.StorageKey]
    gradients: KeptGradients

    @classmethod
    def now(cls, gradients: KeptGradients | None = None) -> StartingMemory:
        """Return the figures of this moment; ``gradients`` where they are kept already."""
        kept = KeptGradients(leaf_tensors()) if gradients is None else gradients
        tensors = holders.live_tensors()
        return cls(holders.bytes_on(tensors), frozenset(holders.storages(tensors)), kept)

    def what_is_left(self) -> str | None:
        """Describe what a failed try has left behind; None for no more than one percent."""
        tensors = holders.live_tensors()
        grown = {
            device: (now - self.bytes_on.get(device, 0), self.bytes_on.get(device, 0))
            for device, now in holders.bytes_on(tensors).items()
        }
        grown = {
            device: (more, before)
            for device, (more, before) in grown.items()
            if more > max(_TOLERATED_SHARE * before, _TOLERATED_BYTES)
        }
        if not grown:
            return None
        held = holders.largest(tensors, known=self.storages, devices=grown.keys(), top=_TOP)
        del tensors
        sizes = ", ".join(
            f"{more / MIB:.1f} MiB more on {device} than before the first try ({before / MIB:.1f})"
            for device, (more, before) in grown.items()
        )
        return f"the failed try has left {sizes}; " + (
            "held are " + "; ".join(map(str, held))
            if held
            else "Python knows no tensor that holds it"
        )


def release_and_check(
    error: BaseException,
    start: StartingMemory | None,
    gradients: KeptGradients | None = None,
    *,
    keep_traceback: bool = True,
) -> str | None:
    """Do :func:`release_memory`, restore the gradients, and return what is left as a sentence.

    Args:
        error: what ended the try.
        start: from before the first try; None skips the check.
        gradients: from before the try; None for those of ``start``.
        keep_traceback: False where nobody will show it again. An emptied frame still keeps its
            function, and with it the variables of a closure.
    """
    release_memory(error)
    if not keep_traceback:
        for current in _with_causes(error):
            current.__traceback__ = None
        return_memory()
    if gradients is None and start is not None:
        gradients = start.gradients
    if gradients is not None:
        gradients.restore()
    return None if start is None else start.what_is_left()


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]


def _optimizers_in_their_first_step(error: BaseException) -> list[Any]:
    """Optimizers whose step is in the traceback and in which no step was ever completed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found: dict[int, Any] = {}
    for current in _with_causes(error):
        for frame, _ in traceback.walk_tb(current.__traceback__):
            optimizer = _optimizer_of(frame, torch.optim.Optimizer)
            if optimizer is not None and _never_stepped(optimizer):
                found[id(optimizer)] = optimizer
    return list(found.values())


def _optimizer_of(frame: FrameType, base: type) -> Any:
    if frame.f_code.co_name not in ("step", "_init_group"):
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, base) else None


def _never_stepped(optimizer: Any) -> bool:
    """Whether its counters say so; the step that failed may have counted itself already."""
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    try:
        return bool(counters) and all(float(counter) <= 1 for counter in counters)
    except RuntimeError:  # they are on a device that has failed
        return False


def _gradient(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None


def _copied(gradient: Any) -> Any:
    try:
        return gradient.detach().clone()
    except (RuntimeError, MemoryError):
        return gradient.detach().cpu()


@functools.lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none."""
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        return trim
    return None
