"""Each question about a failure is answered once in a whole job."""

from collections import defaultdict

import pytest
import torch

from robust_train import failures, launch
from robust_train.features.retry_rules import model as rules
from robust_train.launcher import driver, ending
from robust_train.launcher import job as launcher

FITS = 4


@pytest.fixture
def answers(monkeypatch):
    """The answers to each question: attempts run in this process."""
    given = defaultdict(list)

    def collect(module, name):
        function = getattr(module, name)

        def answer(*args, **keys):
            given[name].append(function(*args, **keys))
            return given[name][-1]

        monkeypatch.setattr(module, name, answer)

    collect(failures, "reports_of")
    for name in ("add_ending", "add_decision"):
        collect(launcher, name)
    collect(ending, "with_advice")
    collect(driver, "decide")
    collect(rules, "is_found")
    return given


def test_each_error_is_answered_exactly_once(answers, tmp_path):
    """An error in a step, and one that ends an attempt."""

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
    assert len(answers["reports_of"]) == 2
    assert len(answers["is_found"]) == 1, "the user's rules looked at one failure"
    (decision,) = answers["decide"]
    assert decision.spec == second.spec, "what was decided is what ran"
    # once for each attempt, of which the second had nothing to answer
    for name in ("add_ending", "with_advice", "add_decision"):
        assert len(answers[name]) == 2
