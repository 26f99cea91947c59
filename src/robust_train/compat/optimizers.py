"""Private names of torch about optimizers, GradScaler and gradients."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any


def can_skip_on_device(optimizer: Any) -> bool:
    """Return whether an optimizer can skip an update because of a figure on the device, as torch's
    fused optimizers can.

    A wrapper around such an optimizer cannot, although it may have the same attribute, because the
    figure never reaches the optimizer. Neither can a fused SGD whose momentum starts in this step:
    torch leaves uninitialised memory in the momentum of a skipped update.
    """
    attributes = getattr(optimizer, "__dict__", {})
    if not attributes.get("_step_supports_amp_scaling"):
        return False
    # A loaded state has the setting of the optimizer that it was saved from.
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # An instance may have another method, for example one with which a scheduler counts the steps.
    steps = (type(optimizer).step, optimizer.step)
    is_of_torch = all(step.__module__.startswith("torch.optim.") for step in steps)
    return is_of_torch and not _starts_momentum(optimizer)


def _starts_momentum(optimizer: Any) -> bool:
    """Return whether the next step creates the momentum of a parameter. Only SGD does that in a
    step."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            state = optimizer.state.get(parameter)
            has_momentum = state and state.get("momentum_buffer") is not None
            if not has_momentum and parameter.grad is not None:
                return True
    return False


@contextlib.contextmanager
def decide_on_host(optimizer: Any) -> Iterator[None]:
    """Let GradScaler read its figure on the host within the block, before it steps an optimizer."""
    name = "_step_supports_amp_scaling"
    if not getattr(optimizer, name, False):
        yield
        return
    attributes = vars(optimizer).copy()
    setattr(optimizer, name, False)
    try:
        yield
    finally:
        if name in attributes:
            setattr(optimizer, name, attributes[name])
        else:
            delattr(optimizer, name)


def found_overflow(scaler: Any, optimizer: Any) -> bool | None:
    """Return whether a GradScaler found an overflow in the gradients that it has unscaled, or None
    for another kind of scaler. This waits for the GPU, as GradScaler does when it steps an
    optimizer that does not decide on the device."""
    figures = overflow_figures(scaler, optimizer)
    return None if figures is None else any(bool(figure) for figure in figures)


def overflow_figures(scaler: Any, optimizer: Any) -> list[Any] | None:
    """Return a GradScaler's figures about the gradients that it has unscaled, one per device, or
    None for another kind of scaler. After an overflow, a figure is not zero."""
    try:
        return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    except (AttributeError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def leave_out_if(optimizer: Any, is_bad: Any) -> Iterator[None]:
    """Let the steps of an optimizer within the block change nothing if ``is_bad`` is true, as
    GradScaler does. The optimizer must be able to skip an update on the device."""
    optimizer.found_inf = is_bad.float()
    optimizer.grad_scale = None
    try:
        yield
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def codes_before_update(optimizer: Any, step_locals: Mapping[str, Any]) -> set[CodeType]:
    """Return the code objects that an optimizer's step runs before it changes weights or moments:
    the closure, and the method that creates the state of the first group."""
    groups = optimizer.param_groups
    candidates: list[Any] = [step_locals.get("closure")]
    if groups and step_locals.get("group", groups[0]) is groups[0]:
        candidates.append(getattr(optimizer, "_init_group", None))
    functions = [inspect.unwrap(function) for function in candidates if function is not None]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def total_norm(torch: Any, parameters: Sequence[Any]) -> Any:
    """Return the norm of all gradients, which stay unchanged.

    torch before 2.6 has no function for it. Clipping to infinity returns the norm too, and
    multiplies the gradients by 1.
    """
    utils = torch.nn.utils
    if not hasattr(utils, "get_total_norm"):
        return utils.clip_grad_norm_(parameters, float("inf"))
    gradients = (parameter.grad for parameter in parameters)
    return utils.get_total_norm([parameter for parameter in gradients if parameter is not None])


def watch_optimizer_steps(on_step: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``on_step`` after every step of every torch optimizer of this process.

    Returns:
        A function that ends this. None if torch is not loaded, or if another program has such
            hooks: adding a hook would raise an error in a thread that iterates over them.
    """
    optimizer = sys.modules.get("torch.optim.optimizer")
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is None or getattr(optimizer, "_global_optimizer_post_hooks", True):
        return None

    def step_is_done(optimizer: object, args: object, kwargs: object) -> None:
        on_step()

    remove: Callable[[], None] = register(step_is_done).remove
    return remove


def has_step_in_backward(parameter: Any) -> bool:
    """Return whether a hook of the user runs as soon as a parameter has its gradient, for example
    an optimizer that steps in the backward pass. Hooks of torch do not count."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    # torch.distributed.optim sets this attribute.
    return hasattr(parameter, "_in_backward_optimizers") or any(
        not getattr(hook, "func", hook).__module__.startswith("torch.") for hook in hooks.values()
    )
