"""The update at the end of an optimizer step, which is left out if it would spoil the weights."""

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

    moved: bool  # the weights did, as far as the host knows
    is_bad: Tensor | None = None  # whether loss or norm was not finite
    waits: bool = False  # reading that would wait for the device
    # whether the device has left the update out; None if the host knows by ``moved``
    left_out: Tensor | None = None


class LateFigure:
    """A figure on its way to the host, which does not wait for the device until it is read."""

    def __init__(self, figure: Tensor) -> None:
        figure = figure.detach()
        self._event: Any = None
        self._copy = torch.empty_like(figure, device="cpu", pin_memory=figure.is_cuda)
        self._copy.copy_(figure, non_blocking=figure.is_cuda)
        if figure.is_cuda:
            # whoever waits for it sleeps, and leaves the core to the data-loader workers
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(figure.device))

    def has_arrived(self) -> bool:
        """Return whether reading it would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Any:
        """Return it as Python's number, after waiting for it if need be."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()


class LateFigures:
    """Figures of earlier steps, copied to the host without waiting for the device."""

    def __init__(self) -> None:
        self._waiting: tuple[int, LateFigure] | None = None

    def swap(self, step: int, figure: Tensor) -> tuple[int, float] | None:
        """Store the figure of `step`, and return the previous figure with its step."""
        before = self._waiting
        self._waiting = (step, LateFigure(figure))
        if before is None:
            return None
        earlier, late = before
        # This copy began a step ago, so that reading it does not wait.
        return earlier, float(late.read())


@dataclass(frozen=True)
class Answer:
    """The host's knowledge of the updates so far."""

    # Whether the weights have changed in this update, or in the one before if the device decides.
    # The first such update counts as one that changed them.
    moved: bool
    # A step, and whether its loss or norm was not finite. None if that is not known yet.
    checked: tuple[int, bool] | None = None


@dataclass(frozen=True)
class _OnTheirWay:
    """The figures of an update that only the device knows; often the same figure twice."""

    step: int
    left_out: LateFigure | None
    is_bad: LateFigure | None


class LateUpdates:
    """How updates have ended. A figure that the device decides by is copied to the host once, and
    is read an update later."""

    def __init__(self) -> None:
        self._waiting: _OnTheirWay | None = None

    def after(self, step: int, done: Update) -> Answer:
        """Take the update of a step; return what is known by now."""
        if not done.waits:
            checked = None if done.is_bad is None else (step, bool(done.is_bad))
            return Answer(done.moved, checked)
        before = self._waiting
        self._waiting = _on_their_way(step, done)
        moved = done.moved
        checked = None
        if before is not None and before.left_out is not None:
            moved = not before.left_out.read()
        if before is not None and before.is_bad is not None:
            checked = (before.step, bool(before.is_bad.read()))
        return Answer(moved, checked)


def _on_their_way(step: int, done: Update) -> _OnTheirWay:
    left_out = None if done.left_out is None else LateFigure(done.left_out)
    if done.is_bad is done.left_out:
        return _OnTheirWay(step, left_out, left_out)
    is_bad = None if done.is_bad is None else LateFigure(done.is_bad)
    return _OnTheirWay(step, left_out, is_bad)


def update(
    optimizer: torch.optim.Optimizer,
    loss: Tensor | None,  # the step's loss, None if unknown
    scaler: Any = None,
    max_grad_norm: float | None = None,
    *,
    skips: bool = True,
) -> Update:
    """Clip, step, and drop the gradients. With ``skips``, skip the step if loss or norm is not
    finite.

    A scaler skips overflows itself, and they do not mean divergence, so only the loss counts then.
    This never waits for the optimizer's kernels: figures that depend on them are read a step later.

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
    """Step and adapt the scale.

    Returns:
        Whether the weights have changed, as far as is known, and the figure by which the device
        leaves the update out, if the device decides.
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
    """Return whether any figure, each on a device of its own, is not zero."""
    here = [figure.to(figures[0].device, non_blocking=True) for figure in figures]
    return torch.stack(here).any()


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    # Use the class, so that the cache does not keep an optimizer alive.
    step = getattr(type(optimizer), "step", optimizer.step)
    if _needs_closure(getattr(step, "__func__", step)):
        name = type(optimizer).__name__
        raise UserError(
            f"run.step: {name} computes the loss several times in a step, so that its update "
            "cannot be left out: call optimizer.step(closure) in place of run.step(optimizer)"
        )


@functools.lru_cache(maxsize=32)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = signature_as_written(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _clip(optimizer: torch.optim.Optimizer, most: float | None) -> Tensor:
    """Return the norm of all gradients, the same on every rank, after clipping it to ``most`` if
    given."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    clip = nn.utils.clip_grad_norm_
    norm: Any = clip(trained, most) if most else total_norm(torch, trained)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _is_bad(figures: Iterable[Tensor | None]) -> Tensor | None:
    figures_known = [figure.detach() for figure in figures if figure is not None]
    if not figures_known:
        return None
    # With a model on several GPUs, the loss and the norm may be on different devices.
    finite = [torch.isfinite(figure).all().to(figures_known[-1].device) for figure in figures_known]
    return ~torch.stack(finite).all()
