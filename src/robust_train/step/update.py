"""Updates the weights at the end of an optimizer step, unless that would spoil them.

``run.step`` calls :func:`update` in the process that trains. At first only the GPU knows whether
the loss and the norm of the gradients are finite. The host must not wait for the GPU in each step,
so it copies such a figure asynchronously and reads it a step later (:class:`LateUpdates`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_train.compat import (
    can_skip_on_device,
    decide_on_host,
    found_overflow,
    leave_out_if,
    overflow_figures,
    signature_as_written,
    total_norm,
)
from robust_train.model.errors import UserError


@dataclass(frozen=True)
class Update:
    """How an optimizer step ended."""

    moved: bool  # the weights changed, as far as the host knows
    is_bad: Tensor | None = None  # whether loss or norm was not finite
    waits: bool = False  # reading the figures would wait for the device
    # Whether the device has skipped the update. None: the host knows it from ``moved``.
    left_out: Tensor | None = None


class LateFigure:
    """A figure that is copied to the host in the background."""

    def __init__(self, figure: Tensor) -> None:
        figure = figure.detach()
        self._event: Any = None
        self._copy = torch.empty_like(figure, device="cpu", pin_memory=figure.is_cuda)
        self._copy.copy_(figure, non_blocking=figure.is_cuda)
        if figure.is_cuda:
            # A thread that waits for a blocking event sleeps, so data-loader workers get its core.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(figure.device))

    def has_arrived(self) -> bool:
        """Return whether the figure can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Any:
        """Return the figure as a Python number. Wait for the device if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()


class LateFigures:
    """Figures of earlier steps, copied to the host without waiting for the device."""

    def __init__(self) -> None:
        self._waiting: tuple[int, LateFigure] | None = None

    def swap(self, step: int, figure: Tensor) -> tuple[int, float] | None:
        """Store the figure of ``step``. Return the step of the previous figure, and the figure."""
        before = self._waiting
        self._waiting = (step, LateFigure(figure))
        if before is None:
            return None
        earlier, late = before
        # The copy began a step ago, so reading it does not wait.
        return earlier, float(late.read())


@dataclass(frozen=True)
class Answer:
    """What the host knows of the updates so far."""

    # Whether this update changed the weights. If the device decides, the answer is that of the
    # previous update, and True for the first.
    moved: bool
    # A step, and whether its loss or norm was not finite. None: not known yet.
    checked: tuple[int, bool] | None = None


@dataclass(frozen=True)
class _PendingFigures:
    """The figures of an update that are being copied from the device. They may be the same."""

    step: int
    left_out: LateFigure | None
    is_bad: LateFigure | None


class LateUpdates:
    """The results of updates. If the device decides whether to skip an update, the host learns the
    result an update later."""

    def __init__(self) -> None:
        self._pending: _PendingFigures | None = None

    def after(self, step: int, done: Update) -> Answer:
        """Record the update of a step, and return what is known so far."""
        checked = None
        if not done.waits:
            if done.is_bad is not None:
                checked = (step, bool(done.is_bad))
            return Answer(done.moved, checked)
        before = self._pending
        self._pending = _start_copies(step, done)
        moved = done.moved
        if before is not None and before.left_out is not None:
            moved = not before.left_out.read()
        if before is not None and before.is_bad is not None:
            checked = (before.step, bool(before.is_bad.read()))
        return Answer(moved, checked)


def _start_copies(step: int, done: Update) -> _PendingFigures:
    """Start copying the figures of an update to the host."""
    left_out = None if done.left_out is None else LateFigure(done.left_out)
    if done.is_bad is done.left_out:
        return _PendingFigures(step, left_out, left_out)
    is_bad = None if done.is_bad is None else LateFigure(done.is_bad)
    return _PendingFigures(step, left_out, is_bad)


def update(
    optimizer: torch.optim.Optimizer,
    loss: Tensor | None,
    scaler: Any = None,
    max_grad_norm: float | None = None,
    *,
    skips: bool = True,
) -> Update:
    """Clip the gradients, step the optimizer, and drop the gradients.

    This never waits for the optimizer's kernels: figures that depend on them are read a step later.

    Args:
        loss: the loss of the step. None: unknown.
        scaler: the gradient scaler, if any. It skips overflows by itself. They do not mean that
            training diverges, so only the loss is checked then.
        max_grad_norm: the norm to clip the gradients to. None or 0: no clipping.
        skips: skip the step if the loss or the norm of the gradients is not finite.

    Raises:
        UserError: the optimizer computes the loss itself.
    """
    _refuse_closures(optimizer)
    scales = scaler is not None and scaler.is_enabled()
    if scales:
        scaler.unscale_(optimizer)
    norm = None
    if max_grad_norm or (skips and not scales):
        norm = _clip(optimizer, max_grad_norm)
    is_bad = None
    if skips:
        is_bad = _is_bad([loss] if scales else [loss, norm])
    moved = True
    waits = False
    left_out = None
    if scales:
        waits = True
        moved, left_out = _step_scaled(optimizer, scaler)
    elif is_bad is not None and can_skip_on_device(optimizer):
        waits = True
        left_out = is_bad
        with leave_out_if(optimizer, is_bad):
            optimizer.step()
    elif is_bad is None or not bool(is_bad):
        optimizer.step()
    else:
        moved = False
    optimizer.zero_grad(set_to_none=True)
    return Update(moved, is_bad, waits, left_out)


def _step_scaled(optimizer: torch.optim.Optimizer, scaler: Any) -> tuple[bool, Tensor | None]:
    """Step the optimizer with scaled gradients, and adapt the scale.

    Returns:
        Two values. The first is whether the weights changed, as far as the host knows. The second
        is a tensor that shows whether the device skipped the update, or None if the host decides.
    """
    if can_skip_on_device(optimizer):
        figures = overflow_figures(scaler, optimizer)
        left_out = _any_of(figures) if figures else None
        scaler.step(optimizer)
        scaler.update()
        return True, left_out
    overflows = found_overflow(scaler, optimizer)
    before = scaler.get_scale() if overflows is None else 0.0
    with decide_on_host(optimizer):
        scaler.step(optimizer)
    scaler.update()
    if overflows is None:
        return bool(scaler.get_scale() >= before), None
    return not overflows, None


def _any_of(figures: Sequence[Tensor]) -> Tensor:
    """Return whether any figure is not zero. The figures may be on different devices."""
    here = [figure.to(figures[0].device, non_blocking=True) for figure in figures]
    return torch.stack(here).any()


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    # The function of the class, because a bound method in the cache would keep the optimizer alive.
    step = getattr(type(optimizer), "step", optimizer.step)
    if _needs_closure(getattr(step, "__func__", step)):
        name = type(optimizer).__name__
        raise UserError(
            f"run.step: {name} computes the loss several times in a step, so its update cannot be "
            "skipped: call optimizer.step(closure) in place of run.step(optimizer)"
        )


@functools.lru_cache(maxsize=32)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = signature_as_written(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _clip(optimizer: torch.optim.Optimizer, most: float | None) -> Tensor:
    """Clip the gradients to a norm of ``most``, if given, and return their norm before that.

    The norm is the same on every rank.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    clip = nn.utils.clip_grad_norm_
    norm: Any = clip(trained, most) if most else total_norm(torch, trained)
    # FSDP2 returns a norm that is distributed over the ranks.
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _is_bad(figures: Iterable[Tensor | None]) -> Tensor | None:
    """Return whether a figure is not finite, without waiting for the device."""
    figures_known = [figure.detach() for figure in figures if figure is not None]
    if not figures_known:
        return None
    # With a model on several GPUs, the loss and the norm may be on different devices.
    finite = [torch.isfinite(figure).all().to(figures_known[-1].device) for figure in figures_known]
    return ~torch.stack(finite).all()
