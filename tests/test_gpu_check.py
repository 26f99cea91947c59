"""``just gpu-check`` without a GPU says so in a line; how its table and exit code come about."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from robust_train.values import GIB, GpuInfo, Inventory
from world import ROOT

SPEC = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks/gpu_check.py")
gpu_check = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_check"] = gpu_check
SPEC.loader.exec_module(gpu_check)


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    return gpu_check.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA does")
def test_without_a_gpu_it_says_so_in_a_line(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_differs_is_marked_and_makes_the_exit_code_1(monkeypatch, capsys):
    checks = {
        "nvml": [gpu_check.equal("problem", None, None), gpu_check.figure("name", "H200")],
        "step": [gpu_check.below("gradients differ by", 1e-5, 0.5)],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run_probe", lambda name, seconds: checks[name])
    assert run(monkeypatch, "nvml") == 0
    assert "all as expected" in capsys.readouterr().out
    assert run(monkeypatch, "nvml", "step") == 1
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("step")] == ["DIFFERS"]
    assert out.endswith("1 differ\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA does")
def test_a_probe_that_fails_keeps_what_it_had_seen(monkeypatch):
    checks = gpu_check.run_probe("guard", 60)
    assert [check.what for check in checks[:2]] == [
        "CUDA started by importing torch",
        "… by device_count()",
    ]
    assert all(check.passed for check in checks[:2])
    assert checks[-1].what == "ends"
    assert not checks[-1].passed


def test_a_probe_that_takes_too_long_is_ended():
    [check] = gpu_check.run_probe("nvml", 0)
    assert check.seen.startswith("still running")
    assert not check.passed


def test_an_unknown_probe_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "nothing")
    assert ended.value.code == 2
    assert "no probe 'nothing'" in capsys.readouterr().err


def test_the_gpu_that_is_measured_is_the_one_that_the_mask_shows(monkeypatch):
    gpus = [GpuInfo(f"GPU-{i}", "A100", i, f"0{i}", 80 * GIB, 80 * GIB, 0) for i in range(2)]
    monkeypatch.setattr(gpu_check, "read_inventory", lambda processes: Inventory(tuple(gpus)))
    for mask, index in (("1", 1), ("GPU-0", 0), ("GPU-1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert gpu_check.gpu().index == index
