import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_world import TINY_VIT, WatchedRun, config, train

from robust_train.attempt.run import live_of
from robust_train.model.errors import ConfigError
from robust_train.vision.reporting import Reporter
from robust_train.vision.step import EpochPosition

SHORT = ("model.width=8", "training.epochs=2")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Two epochs of the default job with a log line every ten steps."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("robust_train")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        run = WatchedRun(tmp_path_factory.mktemp("short"))
        result = train(config(*SHORT, "training.log_every_steps=10"), run)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return SimpleNamespace(run=run, result=result, messages=messages)


def test_a_job_reports_its_progress_and_files(short):
    result, messages = short.result, short.messages
    assert result["test_accuracy"] > 0.5
    assert f"Test accuracy: {100 * result['test_accuracy']:.2f} %" in messages
    assert Path(result["checkpoint"]).is_file()
    lines = [m for m in messages if re.match(r"step \d+/46: loss \d", m)]
    assert [line.split("/")[0] for line in lines] == ["step 10", "step 20", "step 30", "step 40"]
    assert sum(m.startswith("epoch ") and "accuracy" in m for m in messages) == 2
    milestones = ["start", "model moved to cpu", "optimizer created", "epoch 1", "epoch 2"]
    assert [e["milestone"] for e in short.run.of("memory")] == milestones
    assert short.run.last_step == 46
    progress = short.run.of("progress")
    assert "loss" in progress[0]["metrics"]
    assert all(e["total_steps"] == 46 and "lr" in e["metrics"] for e in progress)


def test_displayed_steps_need_no_log_lines(tmp_path, caplog):
    """The launcher shows the steps already."""
    caplog.set_level(logging.INFO)
    run = WatchedRun(tmp_path)
    live_of(run).has_live_status = True
    report_steps(run, range(1, 11), every=5, total=10)
    assert not [m for m in caplog.messages if m.startswith("step ")]


def report_steps(run, steps, *, every, total):
    """Report ``steps`` as a training loop does, without training."""
    with Reporter(run, config(f"training.log_every_steps={every}")) as reporter:
        reporter.report_start(EpochPosition(step=steps[0] - 1), total)
        for step in steps:
            reporter.report_step(EpochPosition(step=step), torch.tensor(1.0), samples=1, lr=0.1)


def scalars(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_gets_loss_learning_rate_and_validation(short):
    events = scalars(short.run.run_dir)
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/lr", "val/accuracy", "val/loss"}
    assert [e.step for e in events.Scalars("train/loss")] == [1, 10, 20, 30, 40]
    assert [e.step for e in events.Scalars("val/accuracy")] == [23, 46]


def test_a_resumed_run_replaces_points_after_its_checkpoint(tmp_path):
    report_steps(WatchedRun(tmp_path), range(1, 31), every=1, total=46)
    report_steps(WatchedRun(tmp_path), range(24, 47), every=1, total=46)
    steps = [e.step for e in scalars(tmp_path).Scalars("train/loss")]
    assert steps == list(range(1, 47))


@pytest.mark.parametrize("every", [3, 1_000_000])
def test_dropped_reports_still_send_each_loss_once(tmp_path, every):
    run = WatchedRun(tmp_path)
    step = 0
    with Reporter(run, config(f"training.log_every_steps={every}")) as reporter:
        while len(run.of("progress")) < 4:
            step += 1
            reporter.report_step(
                EpochPosition(step=step), torch.tensor(float(step)), samples=1, lr=0.1
            )
    sent = [e["metrics"]["loss"] for e in run.of("progress") if "loss" in e["metrics"]]
    assert len(set(sent)) == len(sent)
    if every == 3:
        marks = [event["step"] // 3 * 3 for event in run.of("progress")[1:]]
        assert sent == [1.0, *(mark - 1.0 for mark in marks)]


@pytest.mark.parametrize(
    ("package", "name", "overrides"),
    [
        ("sklearn", "scikit-learn", ("dataset=digits",)),
        ("timm", "timm", ("model=linear_probe",)),
        ("peft", "peft", ("model=lora", *TINY_VIT)),
    ],
)
def test_a_missing_package_is_named_with_its_user(tmp_path, monkeypatch, package, name, overrides):
    for module in [m for m in sys.modules if m.startswith(package + ".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as refusal:
        train(config(*overrides), WatchedRun(tmp_path))
    assert str(refusal.value) == (
        f'{overrides[0]}: needs {name}, which is not installed; pip install "robust-train[vision]"'
    )


def test_without_tensorboard_training_goes_on_with_one_line(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    report_steps(WatchedRun(tmp_path), range(1, 5), every=1, total=4)
    assert sum("TensorBoard" in m for m in caplog.messages) == 1
    assert not (tmp_path / "tensorboard").exists()


IN_A_NEW_PROCESS = """
import importlib, sys, threading
from pathlib import Path
from omegaconf import OmegaConf
from robust_train.vision.trainer import preload_modules, train
from robust_train.attempt.run import Run, live_of

heavy = {'timm', 'peft', 'torchvision', 'sklearn', 'tensorboard', 'PIL', 'scipy'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)

import torch
cfg = OmegaConf.load(sys.argv[1])
for name in preload_modules(cfg):
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
before = set(sys.modules)
if cfg.dataset.name == 'digits':
    train(cfg, Run(run_dir=Path(sys.argv[2])))
print('LATE', len(set(sys.modules) - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("model=lora", "dataset=flowers102")])
def test_preloading_starts_neither_cuda_nor_threads(tmp_path, overrides):
    """All large packages are preloaded, in a process of its own: importing the trainer imports none
    of them.
    """
    cfg = config(*overrides, "training.epochs=1")
    OmegaConf.save(cfg, tmp_path / "cfg.yaml", resolve=True)
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path / "cfg.yaml"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split("LATE")[1]) < 50
