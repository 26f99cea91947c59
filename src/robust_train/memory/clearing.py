"""Return memory: what is not in use any more, and what a model holds."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from robust_train.memory import tensors
from robust_train.memory.cleanup import clear_frames, return_memory
from robust_train.memory.stats import MemoryStats, get_gpu_memory_stats
from robust_train.readable import MIB, mib

log = logging.getLogger("robust_train")

if TYPE_CHECKING:
    from torch import nn

_TOP = 10
_MOST_PASSES = 5


@dataclass(frozen=True)
class Cleared:
    """The result of clearing."""

    before: MemoryStats  # the current device's figures before
    after: MemoryStats  # and after
    dropped_bytes: int = (
        0  # of tensors that no program could reach any more; only with ``force``
    )
    # the largest tensors that are still alive, with the variables that hold them; only with `force`
    held: tuple[tensors.HeldTensor, ...] = ()
    done: tuple[str, ...] = ()  # sentences about what else was done

    @property
    def freed(self) -> int:
        """Bytes released to the device or, without CUDA, to the system; never negative."""
        return max(self.before.reserved - self.after.reserved, 0)

    @property
    def description(self) -> str:
        """The result in a line for people."""
        what = (
            self.after.device
            if self.after.on_gpu
            else "no CUDA in this process; host memory"
        )
        verb = "reserved" if self.after.on_gpu else "resident"
        parts = [
            f"{what}: {mib(self.freed, 1)} released, "
            f"{self.before.reserved / MIB:.1f} → {mib(self.after.reserved, 1)} {verb}",
            *self.done,
        ]
        if self.dropped_bytes:
            parts.append(f"{mib(self.dropped_bytes, 1)} of unreachable tensors dropped")
        if self.held:
            parts.append("still held are " + "; ".join(map(str, self.held)))
        return "; ".join(parts)


def clear_gpu_memory(force: bool = False) -> Cleared:
    """Return memory that this process holds and does not use to the device and to the system.

    Live tensors keep their memory. A cache that is needed again has to be requested again, so do
    not call this in every step.

    Args:
        force: also drop what an ordinary collection leaves alone: objects that ``gc.freeze`` has
            frozen, the collector's own list of garbage, and the frames of the last uncaught
            exception; then name the largest tensors that are left, and the variables that hold
            them. That takes some seconds if large libraries are loaded.
    """
    before = get_gpu_memory_stats()
    done: list[str] = []
    dropped = _drop_unreachable(done) if force else 0
    return_memory(workspaces=True)
    held: list[tensors.HeldTensor] = []
    if force:
        held = tensors.largest_alive(_TOP)
    return _logged(
        Cleared(before, get_gpu_memory_stats(), dropped, tuple(held), tuple(done))
    )


clear_cuda_memory = (
    clear_gpu_memory  # The other name that people know `clear_gpu_memory` by
)


def cleanup_model_memory(model: nn.Module, *, keep_weights: bool = True) -> Cleared:
    """Free what training ``model`` has taken: gradients, optimizers' states, weights.

    Optimizers are found by the parameters that they hold. Weights (parameters and buffers) go to
    the host.

    Args:
        model: any module.
        keep_weights: False replaces the weights by empty tensors, for all other holders too: the
            model cannot be used any more.
    """
    torch = sys.modules["torch"]
    before = get_gpu_memory_stats()
    gc.collect()
    optimizers = _optimizers_of(model, torch.optim.Optimizer)
    for optimizer in optimizers:
        optimizer.state.clear()
    model.zero_grad(set_to_none=True)
    if keep_weights:
        model.cpu()
    else:
        for tensor in (*model.parameters(), *model.buffers()):
            # in place: optimizers would keep parameters that are only replaced
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    weights = "weights on the host" if keep_weights else "weights dropped"
    done = (
        f"gradients and optimizer state ({len(optimizers)} found) dropped, {weights}",
    )
    del optimizers
    return_memory(workspaces=True)
    return _logged(Cleared(before, get_gpu_memory_stats(), done=done))


def _logged(cleared: Cleared) -> Cleared:
    log.info("%s", cleared.description)
    return cleared


def _optimizers_of(model: nn.Module, base: type) -> list[Any]:
    own = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in tensors.live_objects(base)
        if any(
            id(p) in own for group in optimizer.param_groups for p in group["params"]
        )
    ]


def _drop_unreachable(done: list[str]) -> int:
    """Drop what only the interpreter itself holds; return the bytes of tensors among it."""
    gc.collect()
    frozen = gc.get_freeze_count()
    # before anything is dropped, and with the frozen ones, which the collector otherwise leaves out
    gc.unfreeze()
    before = _tensor_bytes()
    if frozen:
        done.append(f"{frozen} objects frozen by gc.freeze are collected again")
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        clear_frames(error)
        done.append(
            f"the frames of the last uncaught {type(error).__name__} were emptied"
        )
    # with DEBUG_SAVEALL its user wants to look into it
    if gc.garbage and not gc.get_debug() & gc.DEBUG_SAVEALL:
        done.append(f"{len(gc.garbage)} objects removed from gc.garbage")
        gc.garbage.clear()
    # finalizers may free what refers to further garbage
    for _ in range(_MOST_PASSES):
        if not gc.collect():
            break
    return max(before - _tensor_bytes(), 0)


def _tensor_bytes() -> int:
    counted = tensors.bytes_on(tensors.live_tensors())
    return sum(counted.get(device, 0) for device in tensors.training_devices())
