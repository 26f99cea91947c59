"""Each question about a failure is answered once in a whole job."""

from collections import Counter

import pytest
import torch

from robust_train import failures, launch
from robust_train.launcher import job as launcher
from robust_train.policy import decide as policy

FITS = 4


@pytest.fixture
def answers():
    """The last answer to each question."""
    return {}


@pytest.fixture
def calls(monkeypatch, answers):
    """How often each question was asked: attempts run in this process."""
    counted = Counter()

    def count(module, name):
        asked = getattr(module, name)

        def counting(*args, **keys):
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
    def train(cfg, run):
        model = torch.nn.Linear(2, 1)

        def loss_of(part):
            if len(part) > FITS:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return model(part).mean()

        run.backward(loss_of, torch.ones(2 * FITS, 2), model)
        run.progress(1)
        if run.attempt == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return int(run.attempt)

    cfg = {"isolation": "none", "training": {"batch_size": 2 * FITS}, "min_batch_size": 2}
    cfg["retry"] = {"rules": [{"message": "no such words", "then": "stop"}]}
    summary = launch(train, cfg, run_dir=tmp_path)
    first, second = summary.attempts
    assert (first.outcome, first.action) == ("device_oom", "halve_batch")
    assert second.outcome == "completed"
    assert "3.00 GiB" in first.failure.message
    # one classification for the error in the first attempt's step, one for what ended it; the
    # second attempt begins with half the batch and meets neither
    assert calls["reports_of"] == 2
    assert calls["is_found"] == 1, "the user's rules looked at one failure"
    assert calls["decide"] == 1
    assert answers["decide"].spec == second.spec, "what was decided is what ran"
    # once for each attempt, of which the second had nothing to answer
    assert calls["ended"] == calls["with_rule"] == calls["with_advice"] == calls["concluded"] == 2
