"""Releases the memory of a failed try, of unused objects or of a model.

The engine and the `OOMHandler` call the first half after a failure, in the process that trains. The
second half is called by users and by the command ``memory clear``. Imports no torch: without torch
no tensors exist.
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

_TOP = 10  # number of tensors that a user sees after clearing
_TOP_OF_A_TRY = 3  # number of tensors that a log line names after a failed try
# A failed try may keep this share of the memory at the start, and at least this many bytes, which
# are the states of generators, counters and the like.
_TOLERATED_SHARE = 0.01
_TOLERATED_BYTES = 64 * 1024


# --- after a failed try ---


def release_memory(error: BaseException, *, thorough: bool = True) -> None:
    """Release everything that a failed try still holds in this process.

    A logger, a Future or tenacity's retry state may keep the exception. The exception keeps its
    traceback with the frames, and the variables of the frames keep every tensor of the failed pass.
    So the frames are cleared. An optimizer whose first step ran out of memory loses its incomplete
    state.

    Call it outside of the failed function, as soon as it has failed. Frames that still run, such as
    that of the caller, cannot be cleared.

    Args:
        error: the exception of the failed try.
        thorough: as in `return_memory`.
    """
    _forget_first_steps(error)
    clear_frames(error)
    return_memory(thorough=thorough, workspaces=True)


def clear_frames(error: BaseException) -> None:
    """Drop the variables of all frames in the traceback of ``error`` and of its causes."""
    for frame in tensors.frames_of(error):
        try:
            frame.clear()
        except RuntimeError:
            continue  # The frame still runs.
        # A debugger may have copied the variables into f_locals. Reading f_locals updates the copy.
        _ = frame.f_locals


def return_memory(*, thorough: bool = True, workspaces: bool = False) -> None:
    """Collect garbage, and return unused memory to the device and to the system.

    Args:
        thorough: let the garbage collector examine all objects. False: only young objects, such as
            those of a pass that just failed. In a process with many libraries, that takes a tenth
            of the time.
        workspaces: also release cuBLAS's workspaces, unless a captured CUDA graph embeds their
            addresses. Not meant for use between steps that succeed.
    """
    if thorough:
        gc.collect()
    else:
        gc.collect(1)
    torch = started_torch()
    if torch is not None:
        try:
            if workspaces and holds_graphs() is False:
                clear_cublas_workspaces(torch)
            # Memory that other processes have released becomes cache, and is returned below.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            # These calls wait for the GPU, so they raise earlier errors of the GPU.
            log.warning("cannot empty the CUDA cache: %s", first_line(error))
    # glibc keeps freed pages, which count towards a cgroup's limit. Other libraries lack the call.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class StartingMemory:
    """The memory of tensors before the first try, to find out what a failed try leaves behind.

    On a GPU it is the figure of the caching allocator, and on the host the size of all storages
    that Python knows.
    """

    def __init__(self) -> None:
        alive = tensors.live_tensors()
        self._bytes_on = tensors.bytes_on(alive)
        self._storages = frozenset(tensors.storages(alive))

    def describe_rest(self) -> str | None:
        """Describe the memory that a failed try left behind, or return None if it is negligible."""
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
    error: BaseException, start: StartingMemory, *, keep_traceback: bool = True
) -> str | None:
    """Drop the gradients of a failed try, release its memory, and describe what is left.

    Args:
        error: the exception that ended the try.
        start: the memory before the first try.
        keep_traceback: False if the traceback is not shown again. A cleared frame still keeps its
            function, and so the variables of a closure.
    """
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
        # Other frames may still run, and would keep the copy of their variables in f_locals.
        if frame.f_code.co_name not in ("step", "_init_group"):
            continue
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer) and _has_never_stepped(owner):
            owner.state.clear()


def has_half_updated(error: BaseException, *, weights_were_written: bool) -> bool:
    """Return whether ``error`` ended an optimizer's step in the middle of its update.

    Then only some parameters may be updated, or the moments without the weights, and no version
    counter shows what a fused kernel has written. While the step runs its closure, or creates the
    state of its first group, nothing has changed unless weights were written.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for current in tensors.with_causes(error):
        walked = traceback.walk_tb(current.__traceback__)
        frames = [frame for frame, _ in walked]
        for number, frame in enumerate(frames):
            optimizer = frame.f_locals.get("self")
            is_step = frame.f_code.co_name == "step"
            if not is_step or not isinstance(optimizer, torch.optim.Optimizer):
                continue
            if weights_were_written:
                return True
            running = {inner.f_code for inner in frames[number + 1 :]}
            if running.isdisjoint(codes_before_update(optimizer, frame.f_locals)):
                return True
    return False


def _has_never_stepped(optimizer: Any) -> bool:
    # The step that failed may have counted itself already.
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    try:
        return bool(counters) and all(float(counter) <= 1 for counter in counters)
    except RuntimeError:  # The counters are on a device that has failed.
        return False


# --- at a user's request ---


@dataclass(frozen=True)
class Cleared:
    """The result of clearing.

    Attributes:
        before: the figures of the current device before clearing.
        after: its figures after clearing.
        held: the largest tensors that are still alive. Only with ``force``.
        done: a description of other effects.
    """

    before: MemoryStats
    after: MemoryStats
    held: tuple[tensors.LiveTensor, ...] = ()
    done: str = ""

    @property
    def freed(self) -> int:
        """Bytes that were released to the device, or to the system without CUDA. Never negative."""
        return max(self.before.reserved - self.after.reserved, 0)

    @property
    def description(self) -> str:
        """The result in a line for people."""
        device = "no CUDA in this process; host memory"
        state = "resident"
        if self.after.on_gpu:
            device = self.after.device
            state = "reserved"
        parts = [
            f"{device}: {mib(self.freed, 1)} released, "
            f"{self.before.reserved / MIB:.1f} → {mib(self.after.reserved, 1)} {state}"
        ]
        if self.done:
            parts.append(self.done)
        if self.held:
            parts.append(f"the largest tensors left: {'; '.join(map(str, self.held))}")
        return "; ".join(parts)


def clear_gpu_memory(force: bool = False) -> Cleared:
    """Return the unused memory of this process to the device and to the system.

    Live tensors keep their memory. The allocator has to request its cache again when it is needed,
    so do not call this in every step.

    Args:
        force: also drop objects that an ordinary collection keeps: objects frozen by ``gc.freeze``,
            the collector's own list of garbage, and the frames of the last uncaught exception. Then
            name the largest tensors that are left. That takes a few seconds if large libraries are
            loaded.

    Returns:
        The figures before and after, in bytes, and with ``force`` the tensors that are left.
    """
    before = get_gpu_memory_stats()
    if force:
        _drop_unreachable()
    return_memory(workspaces=True)
    held = tensors.largest_alive(_TOP) if force else []
    return _log_result(before, held=held)


clear_cuda_memory = clear_gpu_memory
"""An alias of `clear_gpu_memory`, under a name that is widely used."""


def cleanup_model_memory(model: nn.Module, *, keep_weights: bool = True) -> Cleared:
    """Free the memory that training ``model`` took: gradients, optimizer states, weights.

    Optimizers are found by the parameters that they hold. Weights (parameters and buffers) move to
    the host.

    Args:
        model: any module.
        keep_weights: False replaces the weights by empty tensors, wherever they are used. The model
            can no longer be used.

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
            # In place, because optimizers would keep a parameter that is replaced.
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    return_memory(workspaces=True)
    weights = "weights on the host" if keep_weights else "weights dropped"
    done = f"gradients and optimizer state ({optimizers} found) dropped, {weights}"
    return _log_result(before, done=done)


def _log_result(
    before: MemoryStats, held: Iterable[tensors.LiveTensor] = (), done: str = ""
) -> Cleared:
    cleared = Cleared(before, get_gpu_memory_stats(), tuple(held), done)
    log.info("%s", cleared.description)
    return cleared


def _drop_unreachable() -> None:
    """Drop objects that only the interpreter itself refers to."""
    gc.unfreeze()
    error = getattr(sys, "last_exc", None)
    if not error:
        error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        clear_frames(error)
    # With DEBUG_SAVEALL, the user wants to examine the garbage.
    if not gc.get_debug() & gc.DEBUG_SAVEALL:
        gc.garbage.clear()
    # Finalizers may turn further objects into garbage, which the next collection frees.
    gc.collect()
