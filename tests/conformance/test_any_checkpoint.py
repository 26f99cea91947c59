"""Frameworks' trainers resume from the checkpoint of any step, with another micro-batch as well."""

import pytest
import torch

import conformance_trainers
from framework_config import framework_config
from robust_train.attempt.run import live_of
from robust_train.config.checks import unchecked
from robust_train.config.training_plans import MicroBatchPlan
from watched_run import WatchedRun

SAMPLES = 22  # an epoch's third step has six


def trained(folder, kind, batch_size, resume=None, **options):
    """Train in this process; return the model and the run."""
    cfg = framework_config(batch_size, conformance_trainers.EFFECTIVE // batch_size)
    run = WatchedRun(folder, resume=resume)
    live_of(run).parts.split_by(MicroBatchPlan.of(unchecked(cfg)))
    line = getattr(conformance_trainers, kind)(cfg, run, SAMPLES, **options)
    return line, run


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("accelerate", {}),
        ("lightning", {}),
        pytest.param("lightning", {"drop_last": True}, marks=pytest.mark.slow),
        ("transformers", {}),
    ],
)
def test_any_step_resumes_with_equal_samples_and_weights(tmp_path, monkeypatch, kind, options):
    """The samples are those that follow the step."""
    pytest.importorskip(kind, reason=f"the extra [{kind}] is not installed")
    for name in ("READY_FILE", "WEIGHTS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    per_epoch, steps = (16, 2) if options else (SAMPLES, 3)
    whole, run = trained(tmp_path / "whole", kind, 8, **options)
    saved = run.saved_at
    last = steps * conformance_trainers.EPOCHS
    assert set(saved) == set(range(1, last + 1))
    # the last two of an epoch, the next one's first
    for step in (*range(steps - 1, steps + 2), last):
        rest, run = trained(tmp_path / f"from-{step}", kind, 2, saved[step], **options)
        epochs, more = divmod(step, steps)
        assert rest.seen == whole.seen[epochs * per_epoch + more * 8 :], step
        started = [event["step"] for event in run.of("training_started")]
        assert started in ([step], [] if step == last else None)
        torch.testing.assert_close(rest.layer.weight, whole.layer.weight)
