"""Release memory: of a failed try, of unused objects, of a model.

Does not import torch: without it no tensors exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from robust_train.compat import clear_cublas_workspaces, codes_before_update
from robust_train.memory import tensors
from robust_train.memory.cuda import holds_graphs, started_torch
from robust_train.memory.stats import MemoryStats, get_gpu_memory_stats
from robust_train.readable import MIB, first_line, mib

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from torch import nn

_TOP = 10
_TOLERATED_SHARE = 0.01
# below this are generators' states, counters and the like
_TOLERATED_BYTES = 64 * 1024
_TOP_OF_A_TRY = 3


# --- after a failed try ---


def release_memory(error: BaseException, *, thorough: bool = True) -> None:
    """Release everything that a failed try still holds in this process.

    Whoever keeps the exception (a logger, a Future, tenacity's retry state) keeps its traceback
    with the frames, and their variables keep every tensor of the failed pass. So the frames are
    emptied. An optimizer whose first step ran out of memory loses its half-made state.

    Call it outside of the failed function, as soon as it has failed. Frames that still run, among
    them the caller's own, cannot be emptied.
    """
    _forget_first_steps(error)
    clear_frames(error)
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
        thorough: examine all objects, instead of only young objects such as those of a pass that
            just failed. In a process full of libraries, that takes ten times as long.
        workspaces: also release cuBLAS's workspaces, unless a captured CUDA graph embeds their
            addresses. Not meant for use between steps that succeed.
    """
    gc.collect() if thorough else gc.collect(1)
    torch = started_torch()
    if torch is not None:
        try:
            if workspaces and holds_graphs() is False:
                clear_cublas_workspaces(torch)
            # what other processes have released becomes cache, which the next call returns
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # it synchronises, so it shows what else went wrong
            log.warning("cannot empty the CUDA cache: %s", first_line(error))
    # a cgroup counts freed pages that the C library keeps for later; only glibc can return them
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class StartingMemory:
    """The memory of tensors before the first try, for comparison before each later try.

    On a GPU it is the figure of the caching allocator, on the CPU the size of all storages that
    Python knows.
    """

    def __init__(self) -> None:
        alive = tensors.live_tensors()
        self._bytes_on = tensors.bytes_on(alive)
        self._storages = frozenset(tensors.storages(alive))

    def describe_rest(self) -> str | None:
        """Describe the memory that a failed try left behind. Returns None if it is at most 1
        percent."""
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
        alive = tensors.largest_alive(_TOP_OF_A_TRY, sizes, self._storages)
        largest = "; ".join(map(str, alive)) or "in no tensor that Python knows"
        return f"the failed try has left {', '.join(sizes.values())}; the largest: {largest}"


def release_and_check(
    error: BaseException,  # what ended the try
    start: StartingMemory,  # the memory before the first try
    *,
    # False if it is not shown again. An emptied frame still keeps its function, and so the
    # variables of a closure.
    keep_traceback: bool = True,
) -> str | None:
    """Drop the gradients of a failed try, do `release_memory`, and describe what is left."""
    for leaf in tensors.leaves_in(error):
        leaf.grad = None
    release_memory(error)
    if not keep_traceback:
        for current in tensors.with_causes(error):
            current.__traceback__ = None
        return_memory()
    return start.describe_rest()


def _forget_first_steps(error: BaseException) -> None:
    """Drop the state of optimizers in the traceback that have never completed a step."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for frame in tensors.frames_of(error):
        # not of others: a frame that still runs keeps the copy that `f_locals` makes
        in_step = frame.f_code.co_name in ("step", "_init_group")
        owner = frame.f_locals.get("self") if in_step else None
        if isinstance(owner, torch.optim.Optimizer) and _never_stepped(owner):
            owner.state.clear()


def has_half_updated(error: BaseException, *, weights_were_written: bool) -> bool:
    """Return whether ``error`` ended an optimizer's step amid its update.

    Then some groups may be updated and others not, or the moments and not the weights, and no
    version counter shows what a fused kernel has written. The step has changed nothing while its
    closure runs, or while it makes the state of its first group, unless weights were written.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for current in tensors.with_causes(error):
        walked = traceback.walk_tb(current.__traceback__)
        frames = [frame for frame, _ in walked]
        for number, frame in enumerate(frames):
            optimizer = frame.f_locals.get("self")
            is_step = frame.f_code.co_name == "step" and isinstance(
                optimizer, torch.optim.Optimizer
            )
            inner = {below.f_code for below in frames[number + 1 :]}
            if is_step and (
                weights_were_written or not inner & codes_before_update(optimizer, frame.f_locals)
            ):
                return True
    return False


def _never_stepped(optimizer: Any) -> bool:
    # The step that failed may have counted itself already.
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    try:
        return bool(counters) and all(float(counter) <= 1 for counter in counters)
    except RuntimeError:  # they are on a device that has failed
        return False


# --- at a user's request ---


@dataclass(frozen=True)
class Cleared:
    """The result of clearing.

    Attributes:
        before: the current device's figures before.
        after: its figures after.
        held: the largest tensors that are still alive. Only with ``force``.
        done: a description of what else was done.
    """

    before: MemoryStats
    after: MemoryStats
    held: tuple[tensors.LiveTensor, ...] = ()
    done: str = ""

    @property
    def freed(self) -> int:
        """Bytes released to the device or, without CUDA, to the system. Never negative."""
        return max(self.before.reserved - self.after.reserved, 0)

    @property
    def description(self) -> str:
        """The result in a line for people."""
        what = "no CUDA in this process; host memory"
        verb = "resident"
        if self.after.on_gpu:
            what = self.after.device
            verb = "reserved"
        parts = [
            f"{what}: {mib(self.freed, 1)} released, "
            f"{self.before.reserved / MIB:.1f} → {mib(self.after.reserved, 1)} {verb}"
        ]
        parts += [self.done] if self.done else []
        if self.held:
            parts.append(f"the largest tensors left: {'; '.join(map(str, self.held))}")
        return "; ".join(parts)


def clear_gpu_memory(force: bool = False) -> Cleared:
    """Return memory that this process holds without using it to the device and the system.

    Live tensors keep their memory. A cache that is needed again has to be requested again, so do
    not call this in every step.

    Args:
        force: also drop objects that an ordinary collection keeps: those that ``gc.freeze`` has
            frozen, the collector's own list of garbage, and the frames of the last uncaught
            exception. Then name the largest tensors that are left. That takes a few seconds if
            large libraries are loaded.

    Returns:
        The figures before and after, in bytes, and the tensors that are left with ``force``.
    """
    before = get_gpu_memory_stats()
    if force:
        _drop_unreachable()
    return_memory(workspaces=True)
    return _cleared(before, held=tensors.largest_alive(_TOP) if force else ())


# The other name that people know `clear_gpu_memory` by
clear_cuda_memory = clear_gpu_memory


def cleanup_model_memory(model: nn.Module, *, keep_weights: bool = True) -> Cleared:
    """Free the memory that training ``model`` took: gradients, optimizer states, weights.

    Optimizers are found by the parameters that they hold. Weights (parameters and buffers) go to
    the host.

    Args:
        model: any module.
        keep_weights: False replaces the weights by empty tensors, for all other holders too: the
            model can no longer be used.

    Returns:
        The figures before and after, in bytes.
    """
    torch = sys.modules["torch"]
    before = get_gpu_memory_stats()
    gc.collect()
    parameters = set(model.parameters())
    optimizers = 0
    for optimizer in tensors.live_objects(torch.optim.Optimizer):
        if any(parameters.intersection(group["params"]) for group in optimizer.param_groups):
            optimizer.state.clear()
            optimizers += 1
    parameters.clear()
    model.zero_grad(set_to_none=True)
    if keep_weights:
        model.cpu()
    else:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            # Change it in place: optimizers would keep a parameter that is replaced.
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    return_memory(workspaces=True)
    weights = "weights on the host" if keep_weights else "weights dropped"
    done = f"gradients and optimizer state ({optimizers} found) dropped, {weights}"
    return _cleared(before, done=done)


def _cleared(
    before: MemoryStats, held: Iterable[tensors.LiveTensor] = (), done: str = ""
) -> Cleared:
    cleared = Cleared(before, get_gpu_memory_stats(), tuple(held), done)
    log.info("%s", cleared.description)
    return cleared


def _drop_unreachable() -> None:
    """Drop what only the interpreter itself holds."""
    gc.unfreeze()
    error = getattr(sys, "last_exc", None)
    if not error:
        error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        clear_frames(error)
    # With DEBUG_SAVEALL, the user wants to examine the garbage.
    if not gc.get_debug() & gc.DEBUG_SAVEALL:
        gc.garbage.clear()
    # finalizers may free what refers to further garbage, which is collected next
    gc.collect()
