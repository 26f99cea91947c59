"""Figures on a GPU that are read once they are on the host: losses of reports, ends of updates."""

import pytest
import torch

from robust_train.attempt import reports
from robust_train.attempt.losses import LossWatch
from robust_train.attempt.reports import Reports
from robust_train.step import update as updates
from robust_train.step.update import LateUpdates, update


class OnGpu:
    """A figure of a step, which a GPU has not computed yet."""

    is_cuda = True
    ndim = 0

    def __init__(self, value, error=None):
        self.value = value
        self.error = error

    def item(self):
        raise AssertionError("waits for all that is queued on the GPU")


class Late:
    """Stands for its copy, which arrives when ``has_caught_up`` is set."""

    has_caught_up = False

    def __init__(self, figure):
        self.figure = figure

    def has_arrived(self):
        return Late.has_caught_up

    def read(self):
        if self.figure.error is not None:
            raise self.figure.error
        return self.figure.value


class Clock:
    """Goes on by a second whenever it is read, unless it stands."""

    def __init__(self):
        self.now = 100.0
        self.stands = False

    def monotonic(self):
        self.now += 0.0 if self.stands else 1.0
        return self.now


@pytest.fixture
def sent(monkeypatch):
    """The events of an attempt on a GPU that is behind, as (step, loss)."""
    monkeypatch.setattr(updates, "LateFigure", Late)
    monkeypatch.setattr(reports, "time", Clock())
    monkeypatch.setattr(Late, "has_caught_up", False)
    return []


def reporting(sent):
    def note(event):
        sent.append((event.step, event.metrics))

    return Reports(note, is_main=True)


def test_a_loss_waits_for_the_next_report(sent):
    report = reporting(sent)
    assert report.progress(1, None, {"loss": OnGpu(0.5), "lr": 0.1})
    assert sent == []
    report.progress(2, None, {"loss": OnGpu(0.25), "lr": 0.1})
    assert sent == [(1, {"loss": 0.5, "lr": 0.1})]
    report.send_last_progress()
    assert sent[1:] == [(2, {"loss": 0.25, "lr": 0.1})]


def test_an_arrived_loss_is_sent_at_once(sent, monkeypatch):
    monkeypatch.setattr(Late, "has_caught_up", True)
    reporting(sent).progress(1, None, {"loss": OnGpu(0.5)})
    assert sent == [(1, {"loss": 0.5})]


def test_an_unreported_step_sends_what_has_arrived(sent, monkeypatch):
    report = reporting(sent)
    report.progress(1, None, {"loss": OnGpu(0.5)})
    reports.time.stands = True
    with report.muted():
        report.progress(2, None, {})
    monkeypatch.setattr(Late, "has_caught_up", True)
    with report.muted():
        report.progress(2, None, {})
    assert sent == [], "a trial run's reports do not count"
    report.progress(2, None, {"loss": OnGpu(0.25)})
    assert sent == [(1, {"loss": 0.5})]
    report.send_last_progress()
    assert sent[1:] == [(2, {"loss": 0.25})]


def test_a_dict_of_figures_is_named_once(sent, caplog):
    """Nothing would look for a loss in it."""
    report = reporting(sent)
    for step in (1, 2):
        report.progress(step, None, {"metrics": {"loss": 0.5}, "lr": 0.1})
    report.send_last_progress()
    assert len(sent) == 2
    (line,) = caplog.messages
    assert line.startswith("run.progress: metrics is a dict")
    assert line.endswith("pass **metrics")


@pytest.mark.parametrize("stands", [False, True], ids=["held", "not due"])
def test_figures_lost_to_a_fault_are_omitted(sent, stands):
    report = reporting(sent)
    reports.time.stands = stands
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    report.progress(1, None, {"loss": OnGpu(0.5, fault), "lr": 0.1})
    report.progress(2, None, {"loss": OnGpu(0.5, fault), "lr": 0.2})
    report.send_last_progress()
    assert sent == [(1, {"lr": 0.1}), (2, {"lr": 0.2})]


def steps(optimizer, weight, gradients, *, scaler=None, skips=True):
    """Return what each step answers whether the weights have changed."""
    late = LateUpdates()
    watch = LossWatch()
    seen = []
    for number, gradient in enumerate(gradients, start=1):
        if scaler is not None:
            scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, gradient)
        if skips:
            done = update(optimizer, torch.tensor(gradient), scaler)
            seen.append(late.after(number, done).moved)
        else:
            seen.append(watch.step(number, optimizer, scaler, None))
    return seen


INF = float("inf")
GRADIENTS = (1.0, INF, 1.0, INF, INF, 1.0)
AT_ONCE = [True, False, True, False, False, True]
LATE = [True, *AT_ONCE[:-1]]


@pytest.mark.parametrize("has_scaler", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize(("fused", "expected"), [(False, AT_ONCE), (True, LATE)])
def test_a_fused_update_is_answered_late(has_scaler, fused, expected):
    """An overflow too, which fused optimizers once took for an update."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0) if has_scaler else None
    assert steps(optimizer, weight, GRADIENTS, scaler=scaler) == expected
    assert weight.isfinite().all()


def test_unwatched_overflows_are_answered_late_too():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert steps(optimizer, weight, GRADIENTS, scaler=scaler, skips=False) == LATE


def test_momentum_that_begins_is_answered_for_at_once():
    """Its first update is the host's decision; torch's fused kernel would leave random momentum."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    seen = steps(optimizer, weight, (INF, INF, 1.0, INF, 1.0))
    assert seen == [False, False, True, True, False]
    assert weight.isfinite().all()


def test_a_figure_is_copied_once_an_update(monkeypatch):
    """The loss alone tells both whether weights have changed and whether training diverges."""
    copied = []

    class Counted(updates.LateFigure):
        def __init__(self, figure):
            copied.append(figure)
            super().__init__(figure)

    monkeypatch.setattr(updates, "LateFigure", Counted)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    late = LateUpdates()
    checked = []
    for number, gradient in enumerate(GRADIENTS, start=1):
        weight.grad = torch.full_like(weight, gradient)
        answer = late.after(number, update(optimizer, torch.tensor(gradient)))
        checked.append(answer.checked)
    assert len(copied) == len(GRADIENTS)
    assert checked == [None, (1, False), (2, True), (3, False), (4, True), (5, True)]
