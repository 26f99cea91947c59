"""Each question about a failure is answered once in a whole job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from robust_train import failures, launch
from robust_train.launcher import job as launcher
from robust_train.policy import decide as policy

FITS = 4


@pytest.fixture
def answers() -> dict[str, Any]:
    """The last answer to each question."""
    return {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> Counter[str]:
    """How often each question was asked: attempts run in this process."""
    counted: Counter[str] = Counter()

    def count(module: object, name: str) -> None:
        asked: Callable[..., Any] = getattr(module, name)

        def counting(*args: Any, **keys: Any) -> Any:
            counted[name] += 1
            answers[name] = asked(*args, **keys)
            return answers[name]

        monkeypatch.setattr(module, name, counting)

    count(failures, "reports_of")
    for name in ("ended", "with_rule", "with_advice", "decide", "concluded"):
        count(launcher, name)
    count(policy, "is_found")
    return counted


def test_an_error_in_a_step_and_one_that_ends_an_attempt_are_each_answered_once(
    calls, answers, tmp_path
):
    def train(cfg: Any, run: Any) -> int:
        model = torch.nn.Linear(2, 1)

        def loss_of(part: torch.Tensor) -> torch.Tensor:
            if len(part) > FITS:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return model(part).mean()

        run.backward(loss_of, torch.ones(2 * FITS, 2), model)
        run.progress(1)
        if run.attempt == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return int(run.attempt)

    rule = {"message": "no such words", "then": "stop"}
    summary = launch(
        train,
        {
            "isolation": "none",
            "training": {"batch_size": 2 * FITS},
            "min_batch_size": 2,
            "retry": {"rules": [rule]},
        },
        run_dir=tmp_path,
    )
    first, second = summary.attempts
    assert (first.outcome, first.action, second.outcome) == (
        "device_oom",
        "halve_batch",
        "completed",
    )
    assert "3.00 GiB" in first.failure.message
    # one classification for the error in the first attempt's step, one for what ended it; the
    # second attempt begins with half the batch and meets neither
    assert calls["reports_of"] == 2
    assert calls["is_found"] == 1, "the user's rules looked at one failure"
    assert calls["decide"] == 1
    assert answers["decide"].spec == second.spec, "what was decided is what ran"
    # once for each attempt, of which the second had nothing to answer
    assert calls["ended"] == calls["with_rule"] == calls["with_advice"] == calls["concluded"] == 2
