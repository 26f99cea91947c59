"""robust-train memory and cleanup as a user types them, in a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from robust_train.host.allocator import VARIABLE
from simulated_nvml import GPU_IS_LOST, MIB, Gpu, Machine
from terminal import run_at_a_terminal
from world import ROOT, SUPPORT, World, wait_until

MachineWith = Callable[..., Machine]

COMMAND = [sys.executable, "-m", "robust_train.cli.main"]


def run(environ, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.robust_train(*arguments, environ=environ)


@pytest.fixture
def alone(tmp_path: Path):
    """The environment of a machine on which no run is alive."""

    def of(machine: Machine, **more: str) -> dict[str, str]:
        return machine.environment(ROBUST_TRAIN_STATE_DIR=str(tmp_path / "nobody"), **more)

    return of


# --- the machine --------------------------------------------------------------------------------


def test_info_shows_what_gpus_shows_and_the_hosts_memory(machine_with: MachineWith, alone) -> None:
    machine = machine_with(
        Gpu(free_mib=30000, compute=[(2**30, 700), (2**29, None)], graphics=[(2**28, 5)]),
        Gpu(name="T4", total_mib=15000),
        Gpu(),
    )
    machine.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, 2)
    environ = alone(machine)
    header, first, second, skipped, host = run(environ, "memory", "info").stdout.splitlines()
    assert header.split("  ")[0] == "index"
    assert all(word in first for word in ("10960", "30000", "40960", f"{2**30} 700 MiB"))
    assert f"{2**28} (draws) 5 MiB" in first
    assert "T4" in second
    assert skipped == "GPU 2 skipped: GPU is lost"
    assert host.startswith("host memory: ")
    told = json.loads(run(environ, "memory", "info", "--json").stdout)
    assert told["gpus"][0]["processes"][0]["used_bytes"] == 700 * MIB
    assert told["gpus"][0]["used_bytes"] == 10960 * MIB
    assert told["host"]["total_bytes"] > told["host"]["available_bytes"] > 0
    none = run(alone(machine_with()), "memory", "info").stdout.splitlines()
    assert none[0] == "no NVIDIA GPU on this machine (driver 570.86.15)"
    assert none[1].startswith("host memory: ")


# --- enable -------------------------------------------------------------------------------------


def shell(line: str, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    done = subprocess.run(
        ["sh", "-c", line], env={**kept, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_a_shell_that_evaluates_it_has_the_setting() -> None:
    command = " ".join(COMMAND)
    line = f'eval "$({command} memory enable)"; echo "${VARIABLE}"'
    assert shell(line) == "expandable_segments:True\n"
    hostile = "max_split_size_mb:64,x:$(touch oops) 'y'"
    assert shell(line, **{VARIABLE: hostile}) == f"{hostile},expandable_segments:True\n"
    assert shell(line, **{VARIABLE: "expandable_segments:False"}) == "expandable_segments:False\n"


def test_programs_get_json() -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    told = json.loads(run(kept, "memory", "enable", "--json").stdout)
    assert told["variable"] == VARIABLE
    assert told["value"] == "expandable_segments:True"


# --- no live run --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("memory", "info"), ("cleanup", "--stats-only")])
def test_without_a_live_run_info_shows_the_machine(machine_with, alone, arguments):
    environ = alone(machine_with(Gpu(compute=[(2**30, 700)])))
    done = run(environ, *arguments)
    assert done.returncode == 0
    assert not done.stderr
    assert str(2**30) in done.stdout
    told = json.loads(run(environ, *arguments, "--json").stdout)
    assert told["live_run"] is None
    assert told["gpus"][0]["processes"][0]["pid"] == 2**30
    code, shown = run_at_a_terminal([*COMMAND, *arguments], environ)
    assert code == 0
    assert "index  name" in shown


# --- a live run ---------------------------------------------------------------------------------


@pytest.fixture
def live(world: World, tmp_path: Path) -> Iterator[World]:
    """A run that trains on the CPU until it is stopped."""
    paths = f"{Path(__file__).parent}:{SUPPORT}:{ROOT / 'src'}"
    world.with_environ({"PYTHONPATH": paths})
    process = world.start(
        "trainer._target_=trainer_that_holds_memory.holds_memory_until_stopped",
        "auto_device=false",
        "device=cpu",
    )
    try:
        journal = world.run_dir / "journal.jsonl"
        wait_until(
            lambda: (
                process.poll() is not None
                or (journal.exists() and '"training_started"' in journal.read_text())
            ),
            "the trainer is at work",
        )
        assert process.poll() is None, process.communicate()
        yield world
    finally:
        process.send_signal(signal.SIGTERM)
        world.end(process)


def asked(world: World, *arguments: str):
    done = run(world.environ, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_live_run_does_what_it_is_asked_and_tells_before_and_after(live: World) -> None:
    told = asked(live, "memory", "info")
    assert told["live_run"]["after"]["allocated"] > 192 * MIB
    # what the trainer has put out of the collector's reach stays, until force
    plain = asked(live, "memory", "clear", "--run", str(live.run_dir))
    assert plain["held"] == []
    forced = asked(live, "memory", "clear", "--force", "--run", plain["run"])
    assert forced["before"]["allocated"] - forced["after"]["allocated"] > 100 * MIB
    assert "MiB float32" in forced["held"][0]
    reset = asked(live, "memory", "reset")
    assert reset["after"]["peak"] < reset["before"]["peak"]
    limited = asked(live, "memory", "fraction", "0.9")
    assert 0 < limited["limit"] < limited["after"]["total"]
    shot = asked(live, "memory", "snapshot")
    assert shot["written"] == [str(live.run_dir / "memory-tensors-1.json")]
    tensors = json.loads(Path(shot["written"][0]).read_text())
    assert tensors[0]["shape"] == [16 * 2**20]
    cleaned = asked(live, "cleanup", "--force")
    assert (cleaned["run"], cleaned["gpus"]) == (plain["run"], [])
    assert cleaned["host"]["total_bytes"] > 0, "what the text shows"
    refused = run(live.environ, "memory", "fraction", "0.000001")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "fraction=1e-06: that is 0 MiB of host memory" in line
    # people see a sentence and a table
    done = run(live.environ, "memory", "clear")
    assert done.returncode == 0, done.stderr
    sentence, header, *rows = done.stdout.splitlines()
    assert "no CUDA in this process; host memory: " in sentence
    assert header.split() == ["MiB", "before", "after"]
    assert [row.split()[0] for row in rows] == ["allocated", "reserved", "peak", "free"]
    for arguments in (("memory", "info"), ("memory", "reset"), ("cleanup",)):
        code, shown = run_at_a_terminal([*COMMAND, *arguments], live.environ)
        assert code == 0, shown
        assert "host memory: " in shown
        assert "\nallocated " in shown
