"""Letting go of the memory of a failed try before the next one, and checking that it is gone.

Imports no torch: it is looked up among the loaded modules, and where it is not loaded there are no
tensors to care about.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from robust_train.memory import holders
from robust_train.memory.holders import started_torch
from robust_train.values import MIB

log = logging.getLogger("robust_train")

_TOLERATED_SHARE = 0.01
# below this lie generators' states, counters and the like, which no next try will miss
_TOLERATED_BYTES = 64 * 1024
_TOP = 3


def release_memory(error: BaseException, *, thorough: bool = True) -> None:
    """Let go of everything that a failed try still holds in this process.

    Whoever keeps the exception (a logger, a Future, tenacity's retry state) keeps its traceback,
    the traceback keeps the frames, and their variables keep every tensor of the failed pass. So
    the frames are emptied, whoever keeps them; then optimizers whose step ran out of memory lose
    what they had only half made, and memory goes back to the device and the system.

    Call it outside of the failed function, as soon as it has failed. Frames that still run, among
    them the caller's own, cannot be emptied.

    Args:
        error: what ended the try.
        thorough: see :func:`return_memory`.
    """
    optimizers = _optimizers_in_their_first_step(error)
    clear_frames(error)
    for optimizer in optimizers:
        optimizer.state.clear()
    return_memory(thorough=thorough)


def clear_frames(error: BaseException) -> None:
    """Empty the frames in the traceback of ``error`` and of all that it was raised from."""
    for current in _with_causes(error):
        for frame, _ in traceback.walk_tb(current.__traceback__):
            try:
                frame.clear()
            except RuntimeError:
                continue  # it still runs
            # a debugger's look has left a copy of the variables there; this updates it, to nothing
            _ = frame.f_locals


def return_memory(*, thorough: bool = True) -> None:
    """Collect garbage, and give unused memory back to the device and to the system.

    Args:
        thorough: look through all objects; else only through young ones, as those of a pass that
            has just failed are, in a tenth of the time beside a process full of libraries.
    """
    gc.collect() if thorough else gc.collect(1)
    torch = started_torch()
    if torch is not None:
        # cuBLAS keeps workspaces of up to 32 MiB for each stream in the caching allocator
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        try:
            if clear_workspaces is not None:
                clear_workspaces()
            # what other processes have let go of becomes cache, which the next call returns
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        except RuntimeError as error:  # it synchronises, so it shows what else went wrong
            log.warning("cannot empty the CUDA cache: %s", str(error).splitlines()[0])
    trim = _malloc_trim()
    if trim is not None:
        # a cgroup counts freed pages that the C library keeps for later
        trim(0)


@dataclass(frozen=True)
class StartingMemory:
    """What tensors held before the first try, to compare with before each later one.

    On a GPU as the caching allocator counts, on the CPU as the storages of all tensors that Python
    knows; taking it is one pass over Python's objects, some ten milliseconds.

    Attributes:
        bytes_on: bytes by device, ``cpu`` or ``cuda:0``.
        storages: the CPU's and GPUs' storages at that moment.
        with_gradient: ids of the tensors that had a gradient.
    """

    bytes_on: Mapping[str, int]
    storages: frozenset[holders.StorageKey]
    with_gradient: frozenset[int]

    @classmethod
    def now(cls) -> StartingMemory:
        """As it is at this moment."""
        tensors = holders.live_tensors()
        return cls(
            bytes_on=holders.bytes_on(tensors),
            storages=frozenset(holders.storages(tensors)),
            with_gradient=frozenset(id(t) for t in tensors if _gradient(t) is not None),
        )

    def drop_new_gradients(self) -> None:
        """Remove gradients that were not there at the start: the failed try has left them."""
        for tensor in holders.live_tensors():
            if _gradient(tensor) is not None and id(tensor) not in self.with_gradient:
                tensor.grad = None

    def what_is_left(self) -> str | None:
        """What a failed try has left behind, as a sentence; None for no more than one percent."""
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
    error: BaseException, start: StartingMemory | None, *, keep_traceback: bool = True
) -> str | None:
    """:func:`release_memory`, drop the try's gradients, and say what is left.

    Args:
        error: what ended the try.
        start: from before the first try; None skips the check.
        keep_traceback: False where nobody will show it again. An emptied frame still keeps its
            function, and with it the variables of a closure.

    Returns:
        A sentence for the log where more than one percent is left, with the largest tensors and
        who holds them.
    """
    release_memory(error)
    if not keep_traceback:
        for current in _with_causes(error):
            current.__traceback__ = None
        return_memory()
    if start is None:
        return None
    start.drop_new_gradients()
    return start.what_is_left()


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
    return bool(counters) and all(float(counter) <= 1 for counter in counters)


def _gradient(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None


@functools.lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none."""
    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = [ctypes.c_size_t]
        return trim
    return None
