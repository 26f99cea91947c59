"""The launcher from Python: ``launch(trainer, cfg)`` in a script and in a notebook-like session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainers
from robust_train import AttemptsExhausted, ConfigError, TrainerFailed, launch

SCRIPT = """
import sys
from robust_train import launch

FACTOR = 3
print("module loaded as", __name__)

def train(cfg, run):
    if cfg.training.batch_size > 4:
        raise MemoryError
    return cfg.training.batch_size * FACTOR * cfg.mine

if __name__ == "__main__":
    cfg = {"training": {"batch_size": 16, "num_workers": 0}, "mine": 5}
    summary = launch(train, cfg, run_dir=sys.argv[1])
    print("result", summary.result, len(summary.attempts), "torch" in sys.modules)
"""


def test_a_function_of_the_script_itself_is_launched(tmp_path: Path):
    script = tmp_path / "my_script.py"
    script.write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "result 60 3 False" in process.stdout
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_the_trainers_own_exception_is_raised_with_its_traceback(tmp_path: Path, isolation: str):
    with pytest.raises(KeyError) as caught:
        launch(trainers.has_a_bug, {"isolation": isolation}, run_dir=tmp_path)
    assert isinstance(caught.value.__cause__, TrainerFailed)
    assert "in _deep_down" in str(caught.value.__cause__)


def test_a_death_without_an_exception_is_raised_as_trainer_failed(tmp_path: Path):
    with pytest.raises(TrainerFailed, match="SIGSEGV"):
        launch(trainers.dies_of_segfault, run_dir=tmp_path)


def test_memory_that_runs_out_everywhere_is_raised_with_what_was_tried(tmp_path: Path):
    def train(cfg):
        raise MemoryError

    cfg = {"isolation": "none", "training": {"batch_size": 8, "num_workers": 0}}
    with pytest.raises(AttemptsExhausted, match="cpu at micro-batch 8, 4"):
        launch(train, cfg, run_dir=tmp_path)


def test_a_local_function_needs_inline_isolation_and_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="isolation=none"):
        launch(lambda cfg: 1, run_dir=tmp_path)
    assert launch(lambda cfg: 1, {"isolation": "none"}, run_dir=tmp_path).result == 1


def test_wrong_values_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"training\.batch_size"):
        launch(trainers.uses_run, {"training": {"batch_size": "many"}}, run_dir=tmp_path)
    with pytest.raises(ConfigError, match="min_batchsize"):
        launch(trainers.uses_run, {"min_batchsize": 4}, run_dir=tmp_path)


def test_a_job_in_this_process_leaves_the_allocators_variable_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A later job would take it for the user's own."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    launch(
        lambda cfg: 1,
        {"isolation": "none", "auto_device": False, "device": "cpu"},
        run_dir=tmp_path,
    )
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
