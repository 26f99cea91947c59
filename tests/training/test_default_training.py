from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_world import TINY_VIT, WatchedRun, config

from robust_train.errors import ConfigError, Interrupted
from robust_train.vision.reporting import Reporter, TrainingDivergedError
from robust_train.vision.state import Place
from robust_train.vision.trainer import preload_modules, train

SHORT = ("model.width=8", "training.epochs=2")


def test_the_default_job_reads_97_of_100_digits_and_more(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = WatchedRun(tmp_path)
    result = train(config(), run)
    assert result["test_accuracy"] >= 0.97
    assert f"Test accuracy: {100 * result['test_accuracy']:.2f} %" in caplog.messages
    assert Path(result["checkpoint"]).is_file()
    assert "Effective batch size: 64" in caplog.messages


def test_the_memory_milestones_come_in_the_order_of_the_run(tmp_path):
    run = WatchedRun(tmp_path)
    train(config(*SHORT), run)
    assert [e["milestone"] for e in run.of("memory")] == [
        "start",
        "model moved to cpu",
        "optimizer created",
        "epoch 1",
        "epoch 2",
    ]


def test_without_a_terminal_there_are_log_lines_at_the_chosen_distance(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(config(*SHORT, "training.log_every_steps=20"), WatchedRun(tmp_path))
    lines = [m for m in caplog.messages if re.match(r"step \d+/46: loss \d", m)]
    assert [line.split("/")[0] for line in lines] == ["step 20", "step 40"]
    assert sum(m.startswith("epoch ") and "accuracy" in m for m in caplog.messages) == 2


def test_on_a_terminal_there_is_a_progress_bar_in_place_of_step_lines(tmp_path):
    program = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from training_world import TINY_VIT, WatchedRun, config\n"
        "from robust_train.vision.trainer import train\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        f"train(config(*{SHORT!r}, 'training.log_every_steps=5'), WatchedRun(Path(sys.argv[1])))\n"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent,
        stderr=theirs,
        stdout=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
    assert child.wait(timeout=60) == 0
    text = shown.decode()
    assert "46/46" in text
    assert "Test accuracy" in text
    assert "step 5/46" not in text


def scalars(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_gets_loss_learning_rate_and_validation(tmp_path):
    train(config(*SHORT, "training.log_every_steps=10"), WatchedRun(tmp_path))
    events = scalars(tmp_path)
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/lr", "val/accuracy", "val/loss"}
    assert [e.step for e in events.Scalars("train/loss")] == [1, 10, 20, 30, 40]
    assert [e.step for e in events.Scalars("val/accuracy")] == [23, 46]


def test_a_resumed_run_replaces_the_points_after_its_checkpoint(tmp_path):
    cfg = config(*SHORT, "training.log_every_steps=1")
    run = WatchedRun(tmp_path, stop_at_step=30)
    with pytest.raises(Interrupted):
        train(cfg, run)
    first = next(e for e in run.of("checkpoint") if e["step"] == 23)
    train(cfg, WatchedRun(tmp_path, resume=Path(first["path"])))
    steps = [e.step for e in scalars(tmp_path).Scalars("train/loss")]
    assert steps == list(range(1, 47))


@pytest.mark.parametrize("every", [3, 1_000_000])
def test_a_loss_is_told_once_even_where_reports_are_dropped(tmp_path, every):
    run = WatchedRun(tmp_path)
    step = 0
    with Reporter(run, log_every_steps=every, epochs=1) as reporter:
        while len(run.of("progress")) < 4:
            step += 1
            reporter.step(Place(step=step), torch.tensor(float(step)), samples=1, lr=0.1)
    told = [e["metrics"]["loss"] for e in run.of("progress") if "loss" in e["metrics"]]
    assert len(set(told)) == len(told)
    if every == 3:
        marks = [event["step"] // 3 * 3 for event in run.of("progress")[1:]]
        assert told == [1.0, *(mark - 1.0 for mark in marks)]


def test_a_diverging_run_stops_and_keeps_its_checkpoints_clean(tmp_path):
    cfg = config(*SHORT, "training.lr=1e30", "training.max_grad_norm=0")
    run = WatchedRun(tmp_path)
    with pytest.raises(TrainingDivergedError, match=r"smaller training\.lr"):
        train(cfg, run)
    assert run.of("checkpoint") == []


def test_the_effective_batch_is_micro_batch_times_accumulation(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    overrides = ("training.batch_size=32", "training.gradient_accumulation_steps=4")
    result = train(config(*SHORT, *overrides), WatchedRun(tmp_path))
    assert "Effective batch size: 128" in caplog.messages
    assert result["steps"] == 24


def test_progress_tells_the_last_step_and_the_total(tmp_path):
    run = WatchedRun(tmp_path)
    train(config(*SHORT), run)
    assert run.last_step == 46
    assert "loss" in run.of("progress")[0]["metrics"]
    assert all(e["total_steps"] == 46 and "lr" in e["metrics"] for e in run.of("progress"))


@pytest.mark.parametrize(
    ("choice", "override"),
    [
        ("model=lora", "model.lora_r=abc"),
        ("model=lora", "model.lora_rr=4"),
        ("model=cnn", "model.lora_r=4"),
        ("dataset=digits", "dataset.test_fraction=0.5"),
        ("dataset=cub200", "dataset.rooot=data"),
        ("dataset=flowers102", "dataset.download=perhaps"),
    ],
)
def test_a_mistyped_key_or_value_is_rejected_by_hydra(choice, override):
    with pytest.raises(ConfigCompositionException):
        config(choice, override)


@pytest.mark.parametrize(
    ("package", "name", "overrides"),
    [
        ("sklearn", "scikit-learn", ("dataset=digits",)),
        ("timm", "timm", ("model=linear_probe",)),
        ("peft", "peft", ("model=lora", *TINY_VIT)),
    ],
)
def test_a_missing_package_is_named_with_what_needs_it(
    tmp_path, monkeypatch, package, name, overrides
):
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
    result = train(config(*SHORT), WatchedRun(tmp_path))
    assert result["steps"] == 46
    assert sum("TensorBoard" in m for m in caplog.messages) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_importing_the_trainer_imports_no_optional_package(tmp_path):
    program = (
        "import sys\n"
        "import robust_train.vision.trainer\n"
        "heavy = {'timm', 'peft', 'torchvision', 'sklearn', 'tensorboard', 'PIL', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("overrides", [(), ("model=lora", "dataset=flowers102")])
def test_what_is_preloaded_starts_neither_cuda_nor_threads(overrides):
    names = preload_modules(config(*overrides))
    program = (
        "import importlib, threading, torch\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1\n"
        "print('fine')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "fine"


def test_after_preloading_training_imports_no_large_package_any_more(tmp_path):
    program = (
        "import importlib, sys\n"
        "from pathlib import Path\n"
        "from robust_train.vision.trainer import preload_modules, train\n"
        "from robust_train.run import Run\n"
        "from omegaconf import OmegaConf\n"
        "cfg = OmegaConf.load(sys.argv[1])\n"
        "for name in preload_modules(cfg): importlib.import_module(name)\n"
        "before = set(sys.modules)\n"
        "train(cfg, Run(run_dir=Path(sys.argv[2])))\n"
        "print('LATE', len(set(sys.modules) - before))\n"
    )
    from omegaconf import OmegaConf

    OmegaConf.save(config(*SHORT), tmp_path / "cfg.yaml", resolve=True)
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "cfg.yaml"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout.split("LATE")[1]) < 50
