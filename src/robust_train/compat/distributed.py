"""Private names of torch's process groups, DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def wrap_collectives(watch: Callable[..., AbstractContextManager[None]]) -> tuple[Any, Any]:
    """Return FSDP2's all-gather and reduce-scatter, which run within the context ``watch(is_gather,
    output, input, group, op)``."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def wrap(kind: Any, *, is_gather: bool) -> Any:
        class Watched(kind):  # type: ignore[misc]
            def __call__(
                self, output_tensor: Any, input_tensor: Any, group: Any, **options: Any
            ) -> Any:
                op = options.get("op")
                with watch(is_gather, output_tensor, input_tensor, group, op):
                    return super().__call__(output_tensor, input_tensor, group, **options)

        return Watched()

    return (
        wrap(collectives.DefaultAllGather, is_gather=True),
        wrap(collectives.DefaultReduceScatter, is_gather=False),
    )


def settle_buckets(wrapper: Any) -> None:
    """Let DistributedDataParallel group the gradients into its final buckets now. It does so once,
    in the forward pass after its first step."""
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True


def hook_and_delay(wrapper: Any) -> tuple[bool, bool]:
    """Return whether DistributedDataParallel has a communication hook, and whether it delays the
    exchange of gradients."""
    delays = bool(getattr(wrapper, "_delay_all_reduce_params", None))
    return bool(getattr(wrapper, "_comm_hooks", None)), delays


def collectives_begun(group: Any) -> int:
    """Return how many collectives a process group has started, or 0 if they are not counted."""
    try:
        return int(group._get_sequence_number_for_group())
    # A wrapper around several backends may not count them.
    except (AttributeError, RuntimeError):
        return 0


def groups_of_process(dist: Any) -> list[Any]:
    """Return the process groups of this process, empty if torch keeps them elsewhere."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def sharding_has_begun(module: Any) -> bool:
    """Return whether a module sharded by FSDP2 has started a pass. Before that, it has no state to
    reset."""
    return module._get_fsdp_state()._is_root is not None


def reset_sharding(root: Any) -> None:
    """Reset a model sharded by FSDP2 after an interrupted pass.

    Before torch 2.15, ``reset_iter_state`` keeps the gradients of unsharded weights, to which the
    next pass would add.
    """
    root.reset_iter_state()
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                # The first pass creates them.
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None


def has_own_collectives(module: Any) -> bool:
    """Return whether a module sharded by FSDP2 uses collectives of the user."""
    used = set()
    for group in module._get_fsdp_state()._fsdp_param_groups:
        used |= {type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__}
    return not used <= {"DefaultAllGather", "DefaultReduceScatter", "Watched"}
