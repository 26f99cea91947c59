"""robust-train gpus: what `just check` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import warm
from simulated_nvml import GPU_IS_LOST, MIB, Gpu, Machine

MachineWith = Callable[..., Machine]

COMMAND = [sys.executable, "-m", "robust_train.cli.main", "gpus"]


def run(machine: Machine, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = warm.robust_train("gpus", *arguments, environ=machine.environment(**environ))
    assert done.returncode == 0, done.stderr
    return done


def test_a_pipe_gets_aligned_columns(machine_with: MachineWith) -> None:
    machine = machine_with(
        Gpu(total_mib=40960, free_mib=2200, reserved_mib=560, utilization=63, compute=[(2**30, 9)]),
        Gpu(name="T4", total_mib=15000, utilization=None),
    )
    done = run(machine)
    header, first, second = done.stdout.splitlines()
    assert header.split("  ")[0] == "index"
    for words in ("NVIDIA A100-SXM4-40GB", machine.uuid(0), "38200", "2200", "40960", "63%"):
        assert words in first
    assert f"pid {2**30} 9 MiB" in first
    end = header.index("total MiB") + len("total MiB")
    assert first[:end].endswith(" 40960")
    assert second[:end].endswith(" 15000")
    assert "\x1b" not in done.stdout


def test_processes_are_named_with_user_and_command(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(compute=[(os.getpid(), 700)]))
    command = Path("/proc/self/comm").read_text().strip()
    in_host = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    expected = f":{command}({os.getpid()}) 700 MiB" if in_host else f"pid {os.getpid()} 700 MiB"
    assert expected in run(machine).stdout


def test_skipped_and_hidden_gpus_are_listed_with_the_reason(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(), Gpu(compute_mode=2), Gpu())
    machine.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, 2)
    done = run(machine, CUDA_VISIBLE_DEVICES=f"{machine.uuid(0)},GPU-x")
    _, first, second, third = done.stdout.splitlines()
    assert "hidden" not in first
    assert "hidden by CUDA_VISIBLE_DEVICES; compute mode is prohibited" in second
    assert third == "GPU 2 skipped: GPU is lost"
    assert "warning: CUDA_VISIBLE_DEVICES=" in done.stderr
    assert "'GPU-x'" in done.stderr


def test_hiding_every_gpu_on_purpose_is_said_without_a_warning(machine_with: MachineWith) -> None:
    done = run(machine_with(Gpu()), CUDA_VISIBLE_DEVICES="")
    assert "hidden by CUDA_VISIBLE_DEVICES" in done.stdout
    assert done.stderr == ""


def test_a_machine_without_gpus_is_told_in_a_sentence(machine_with: MachineWith) -> None:
    assert run(machine_with()).stdout == "no NVIDIA GPU on this machine (driver 570.86.15)\n"


def test_json_is_for_programs(machine_with: MachineWith) -> None:
    machine = machine_with(Gpu(free_mib=100), Gpu(compute=[(2**30, 9)]), Gpu())
    machine.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, 2)
    told = json.loads(run(machine, "--json", CUDA_VISIBLE_DEVICES=machine.uuid(1)).stdout)
    assert [gpu["visible"] for gpu in told["gpus"]] == [False, True]
    assert told["gpus"][0]["free_bytes"] == 100 * MIB
    (process,) = told["gpus"][1]["processes"]
    assert process == {
        "pid": 2**30,
        "used_bytes": 9 * MIB,
        "computes": True,
        "command": None,
        "user": None,
    }
    assert told["skipped"] == [{"index": 2, "reason": "GPU is lost", "uuid": None}]
    assert told["driver_version"] == "570.86.15"
