"""robust-train plan: what a user sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import robust_train
import warm
from robust_train.cli.main import main
from robust_train.queue.reservations import JobRegistry, new_record
from robust_train.values import MIB
from simulated_nvml import Gpu, Machine

LARGE = ("model=cnn", "model.image_size=96")
MachineWith = Callable[..., Machine]


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory on a machine whose GPUs, if there are any, are hidden."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_says_what_fits_on_the_gpus_now(machine_with: MachineWith, tmp_path: Path) -> None:
    machine = machine_with(
        Gpu(total_mib=8192, free_mib=8000),
        Gpu(total_mib=40960, free_mib=40000),
        Gpu(total_mib=24576, free_mib=300),
    )
    queue = tmp_path / "queue"
    queue.mkdir(mode=0o700)
    registry = JobRegistry(queue)
    try:
        with registry.locked():
            record = new_record("other", str(tmp_path), 5000 * MIB, 1)
            reservation = registry.enter(record, registry.jobs())
            reservation.update(reservation.record.on([machine.uuid(0)]))
        done = warm.robust_train(
            *("plan", "--json"),
            *("model=cnn", "dataset=digits", f"gpu_queue_dir={queue}", "--batch-sizes=64,8"),
            environ=machine.environment(),
            cwd=tmp_path,
        )
    finally:
        reservation.release()
        registry.close()
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert [(row["batch_size"], row["accumulates"]) for row in plan["rows"]] == [
        (8, True),
        (64, False),
    ]
    eight, asked = plan["rows"]
    assert eight["tensors_bytes"] < asked["tensors_bytes"] < 64 * MIB
    assert sum(asked["parts"].values()) == asked["tensors_bytes"]
    small, large, full = plan["gpus"]
    assert small["why_not"] == f"reserved by other, {record.user}"
    assert (small["usable_bytes"], small["largest_batch_now"]) == (0, None)
    assert small["largest_batch_empty"] > 1000
    assert (large["usable_bytes"], large["why_not"]) == (40000 * MIB, None)
    assert large["largest_batch_now"] >= small["largest_batch_empty"]
    assert full["why_not"] == "less than min_gpu_memory_mb=4000 is free"
    assert {tuple(row["fits_on"]) for row in plan["rows"]} == {(1,)}


def test_without_a_gpu_common_sizes_are_shown_as_a_hint(
    no_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", *LARGE, "--batch-sizes", "512"])
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    assert "CUDA_VISIBLE_DEVICES hides every GPU: the largest batch" in shown.out
    lines = shown.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["8", "GB"])
    largest = [int(number) for number in lines[header + 1].split()]
    assert largest == sorted(largest)
    assert len(largest) == 6
    assert largest[-1] == 1438, "the training images of digits"
    assert lines[0] == "cnn on digits, bfloat16 (float16 takes the same); sizes in MiB"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model.widht=3"], "model.widht=3: no such key (did you mean width?)"),
        (["model=lorra"], "model=lorra: no such option"),
        (["training.epochs=many"], "training.epochs=many: accepted is an integer"),
        (["trainer._target_=my.trainer"], "only the built-in trainer can be planned"),
        (["training.batch_size=8,16"], "training.batch_size=8,16: one value at a time"),
        (["training.batch_size"], "training.batch_size: cannot be read as an override"),
        (["--batch-sizes", "8,x"], "robust-train plan: argument --batch-sizes: 8,x"),
        (["--batch-sizes", "0"], "accepted are integers of 1 or more"),
        (
            ["dataset=image_folder", "dataset.root=absent"],
            "dataset.root=absent: there is no folder absent/train",
        ),
    ],
)
def test_a_mistake_costs_one_line_and_exit_code_2(
    no_gpu: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert told in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_missing_extra_is_named_with_the_command_that_brings_it(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as the import system marks what is known not to be there
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["plan", "model=lora"]) == 2
    assert capsys.readouterr().err == (
        'model=lora: needs timm, which is not installed; pip install "robust-train[vision]"\n'
    )


def test_a_program_can_plan_too(no_gpu: Path) -> None:
    plan = robust_train.plan_memory(
        {
            "model": {"name": "cnn", "width": 8, "image_size": None, "dropout": 0, "weights": None},
            "dataset": {"name": "digits", "augment": "none", "num_classes": 3},
            "trainer": {"_target_": "robust_train.vision.trainer.train"},
            "training": {"batch_size": 8, "gradient_accumulation_steps": 2},
        },
        batch_sizes=[8, 16],
    )
    assert [(row.batch_size, row.accumulates) for row in plan.rows] == [
        (8, True),
        (16, True),
    ]
    with pytest.raises(robust_train.ConfigError, match="only the built-in trainer"):
        robust_train.plan_memory({"trainer": {"_target_": "my.trainer"}})
