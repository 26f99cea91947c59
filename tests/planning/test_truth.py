"""What earlier runs have measured, from the run folders that they leave."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from training_config import config

from robust_train.planning.memory_plan import find_truth
from robust_train.runfolder.summary import AttemptRecord, Summary
from robust_train.values import (
    MIB,
    Attempt,
    AttemptSpec,
    Failure,
    FailureKind,
    GpuInfo,
    Outcome,
)

GPU = GpuInfo("GPU-a", "A100", 0, "0000:01:00.0", 40960 * MIB, 40000 * MIB, 0)
SPEC = AttemptSpec(gpus=(GPU,), batch_size=32, gradient_accumulation_steps=2)
DONE = Outcome(failure=None, end_step=40, peak_memory_bytes=700 * MIB)


def leave_run(folder: Path, *attempts: Attempt, overrides: tuple[str, ...] = ()) -> Path:
    """A run folder as a job on a GPU leaves it."""
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(config(*overrides), folder / ".hydra" / "config.yaml")
    records = tuple(AttemptRecord(attempt) for attempt in attempts)
    Summary("completed", folder, attempts=records).write()
    return folder


def test_peaks_of_the_same_job_are_found_at_any_depth(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "outputs" / "day" / "time", Attempt(SPEC, DONE))
    for roots in ([tmp_path], [folder], [tmp_path / "absent", tmp_path / "outputs"]):
        found = find_truth(config("training.lr=0.5", "training.batch_size=8"), roots)
        (measured,) = found.measured
        assert (measured.batch_size, measured.accumulates) == (32, True)
        assert measured.peak_bytes == 700 * MIB
        assert measured.run_dir == folder
        assert found.of(32, True) == measured
        assert found.of(32, False) is None


@pytest.mark.parametrize(
    "override",
    [
        "model.width=64",
        "model=linear_probe",
        "dataset=cub200",
        "training.mixed_precision=false",
        "training.gradient_checkpointing=true",
        "trainer._target_=my.trainer",
    ],
)
def test_another_models_peak_is_no_measure(tmp_path: Path, override: str) -> None:
    leave_run(tmp_path / "run", Attempt(SPEC, DONE))
    assert find_truth(config(override), [tmp_path]).measured == ()


def test_what_was_not_a_whole_run_on_a_gpu_with_one_batch_tells_nothing(tmp_path: Path) -> None:
    ran_out = replace(DONE, failure=Failure(FailureKind.DEVICE_OOM, "out of memory"))
    leave_run(
        tmp_path / "a",
        Attempt(SPEC, ran_out),
        Attempt(SPEC, replace(DONE, end_step=1)),
        Attempt(SPEC, replace(DONE, peak_memory_bytes=None)),
        Attempt(replace(SPEC, gpus=(GPU, GPU), ranks=2), DONE),
        Attempt(replace(SPEC, gpus=()), DONE),
    )
    split = leave_run(tmp_path / "b", Attempt(SPEC, DONE))
    (split / "journal.jsonl").write_text('{"time": 1, "event": "micro_batch_changed"}\n')
    torn = leave_run(tmp_path / "c", Attempt(SPEC, DONE))
    (torn / "summary.json").write_text('{"attempts": [{')
    unknown = leave_run(tmp_path / "d", Attempt(SPEC, DONE))
    (unknown / ".hydra" / "config.yaml").write_text("model: [\x00")
    found = find_truth(config(), [tmp_path])
    assert found.measured == ()
    assert found.on_cpu == 1


def test_the_newest_measurement_of_a_size_counts(tmp_path: Path) -> None:
    for age, peak in ((1000, 600), (10, 800), (500, 700)):
        folder = leave_run(
            tmp_path / str(age), Attempt(SPEC, replace(DONE, peak_memory_bytes=peak * MIB))
        )
        os.utime(folder / "summary.json", (10**9 - age, 10**9 - age))
    newest = find_truth(config(), [tmp_path]).of(32, True)
    assert newest is not None
    assert newest.peak_bytes == 800 * MIB
