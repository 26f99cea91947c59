"""Frameworks' trainers go on from the checkpoint of any step, with another micro-batch as well."""

from pathlib import Path

import pytest
import torch

import conformance_trainers
from framework_config import framework_config
from robust_train.attempt.run import MicroBatchPlan, Run
from robust_train.config.checks import unchecked

SAMPLES = 22  # an epoch's third step has six


def trained(folder, kind, batch_size, resume=None, **options):
    """Train in this process; return the model and the run's events."""
    cfg = framework_config(batch_size, conformance_trainers.EFFECTIVE // batch_size)
    events: list[dict] = []
    run = Run(
        run_dir=folder,
        resume_checkpoint=None if resume is None else Path(resume),
        report=lambda event: events.append(event.as_json()),
    )
    run.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
    line = getattr(conformance_trainers, kind)(cfg, run, SAMPLES, **options)
    return line, events


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("accelerate", {}),
        ("lightning", {}),
        pytest.param("lightning", {"drop_last": True}, marks=pytest.mark.slow),
        ("transformers", {}),
    ],
)
def test_from_any_step_the_samples_that_follow_and_the_weights_are_the_same(
    tmp_path, monkeypatch, kind, options
):
    pytest.importorskip(kind, reason=f"the extra [{kind}] is not installed")
    for name in ("READY_FILE", "WEIGHTS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    per_epoch, steps = (16, 2) if options else (SAMPLES, 3)
    whole, events = trained(tmp_path / "whole", kind, 8, **options)
    saved = {one["step"]: one["path"] for one in events if one["event"] == "checkpoint"}
    last = steps * conformance_trainers.EPOCHS
    assert set(saved) == set(range(1, last + 1))
    for step in (*range(1, steps + 2), last - 1, last):
        rest, events = trained(tmp_path / f"from-{step}", kind, 2, saved[step], **options)
        epochs, more = divmod(step, steps)
        assert rest.seen == whole.seen[epochs * per_epoch + more * 8 :], step
        started = [one["step"] for one in events if one["event"] == "training_started"]
        assert started in ([step], [] if step == last else None)
        torch.testing.assert_close(rest.layer.weight, whole.layer.weight)
