"""Release the memory of a failed try before the next one, and check that it is gone.

Imports no torch: without it there are no tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from robust_train.compat import clear_cublas_workspaces
from robust_train.memory import tensors
from robust_train.memory.cuda import memory_segments, started_torch
from robust_train.readable import MIB, first_line, mib

log = logging.getLogger("robust_train")

_TOLERATED_SHARE = 0.01
# below this are generators' states, counters and the like
_TOLERATED_BYTES = 64 * 1024
_TOP = 3


def release_memory(error: BaseException, *, thorough: bool = True) -> None:
    """Release everything that a failed try still holds in this process.

    Whoever keeps the exception (a logger, a Future, tenacity's retry state) keeps its traceback
    with the frames, and their variables keep every tensor of the failed pass. So the frames are
    emptied. An optimizer whose first step ran out of memory loses its half-made state.

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
    for frame in tensors.frames_of(error):
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
            segments = memory_segments(torch) if workspaces else None
            if segments is not None and not any(
                segment.is_private for segment in segments
            ):
                clear_cublas_workspaces(torch)
            # what other processes have released becomes cache, which the next call returns
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        except (
            RuntimeError
        ) as error:  # it synchronises, so it shows what else went wrong
            log.warning("cannot empty the CUDA cache: %s", first_line(error))
    trim = _malloc_trim()
    if trim is not None:
        # a cgroup counts freed pages that the C library keeps for later
        trim(0)


class KeptGradients:
    """Gradients as they are now, to go back to after a failed try: the same tensors and values. A
    try may add to a gradient or set it to zero, so its values are copied; to the host if the
    device has no room for that."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._kept = {
            id(tensor): (weakref.ref(tensor), tensor.grad, _copied(tensor.grad))
            for tensor in tensors
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None
        }

    def restore(self) -> None:
        """Drop gradients that were not there, and give the others their values back."""
        for tensor in leaf_tensors():
            reference = self._kept[id(tensor)][0] if id(tensor) in self._kept else None
            if tensor.grad is not None and (
                reference is None or reference() is not tensor
            ):
                tensor.grad = None
        for reference, gradient, values in self._kept.values():
            tensor = reference()
            if tensor is not None:
                gradient.data.copy_(values)
                tensor.grad = gradient


def leaf_tensors() -> list[Any]:
    """Return every tensor that a backward pass may give a gradient."""
    return [t for t in tensors.live_tensors() if t.is_leaf and t.requires_grad]


class StartingMemory:
    """The memory of tensors before the first try, to compare with before each later one.

    On a GPU it is what the caching allocator counts, on the CPU the storages of all tensors that
    Python knows. ``gradients`` are those of this moment, if they are kept already.
    """

    def __init__(self, gradients: KeptGradients | None = None) -> None:
        self.gradients = (
            KeptGradients(leaf_tensors()) if gradients is None else gradients
        )
        alive = tensors.live_tensors()
        self._bytes_on = tensors.bytes_on(alive)
        self._storages = frozenset(tensors.storages(alive))

    def describe_rest(self) -> str | None:
        """Describe what a failed try has left behind; None if it is at most one percent."""
        sizes = {}
        for device, now in tensors.bytes_on(tensors.live_tensors()).items():
            before = self._bytes_on.get(device, 0)
            if now - before > max(_TOLERATED_SHARE * before, _TOLERATED_BYTES):
                sizes[device] = (
                    f"{mib(now - before, 1)} more on {device} than before the first try "
                    f"({before / MIB:.1f})"
                )
        if not sizes:
            return None
        found = tensors.largest_alive(_TOP, sizes, self._storages)
        largest = "; ".join(map(str, found)) or "in no tensor that Python knows"
        return f"the failed try has left {', '.join(sizes.values())}; the largest: {largest}"


def release_and_check(
    error: BaseException,  # what ended the try
    start: StartingMemory | None,  # from before the first try; None skips the check
    gradients: KeptGradients
    | None = None,  # from before the try; None for those of `start`
    *,
    # False if it is not shown again. An emptied frame still keeps its function, and so the
    # variables of a closure.
    keep_traceback: bool = True,
) -> str | None:
    """Do :func:`release_memory`, restore the gradients, and return what is left as a sentence."""
    release_memory(error)
    if not keep_traceback:
        for current in tensors.with_causes(error):
            current.__traceback__ = None
        return_memory()
    if gradients is None and start is not None:
        gradients = start.gradients
    if gradients is not None:
        gradients.restore()
    return None if start is None else start.describe_rest()


def _optimizers_in_their_first_step(error: BaseException) -> list[Any]:
    """Return optimizers with a step in the traceback that have never completed one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found: dict[int, Any] = {}
    for frame in tensors.frames_of(error):
        if frame.f_code.co_name in ("step", "_init_group"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.optim.Optimizer) and _never_stepped(owner):
                found[id(owner)] = owner
    return list(found.values())


def _never_stepped(optimizer: Any) -> bool:
    # the step that failed may have counted itself already
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    try:
        return bool(counters) and all(float(counter) <= 1 for counter in counters)
    except RuntimeError:  # they are on a device that has failed
        return False


def _copied(gradient: Any) -> Any:
    try:
        return gradient.detach().clone()
    except (RuntimeError, MemoryError):
        return gradient.detach().cpu()


@functools.lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function; other C libraries have none."""
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        return trim
    return None
