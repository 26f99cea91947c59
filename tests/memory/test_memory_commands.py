"""robust-train memory as a user types them, in a terminal and in a pipe."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from robust_train.host.allocator import VARIABLE
from robust_train.memory.reports import perform
from simulated_nvml import GPU_IS_LOST, MIB, Gpu
from terminal import run_at_a_terminal
from world import wait_until

COMMAND = [sys.executable, "-m", "robust_train.cli.main"]


def run(environ, *arguments):
    return warm.robust_train(*arguments, environ=environ)


def answer_of(environ, *arguments):
    done = run(environ, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# --- the machine ---


def test_info_shows_gpus_and_host_memory(machine_with):
    machine = machine_with(
        Gpu(free_mib=30000, compute=[(2**30, 700), (2**29, None)], graphics=[(2**28, 5)]),
        Gpu(name="T4", total_mib=15000),
        Gpu(),
    )
    machine.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, 2)
    environ = machine.environment()
    done = run(environ, "memory", "info")
    assert (done.returncode, done.stderr) == (0, "")
    header, first, second, skipped, host = done.stdout.splitlines()
    assert header.split("  ")[0] == "index"
    assert all(word in first for word in ("10960", "30000", "40960", f"{2**30} 700 MiB"))
    assert f"{2**28} (draws) 5 MiB" in first
    assert "T4" in second
    assert skipped.startswith("GPU 2 skipped: GPU is lost")
    assert host.startswith("host memory: ")
    told = answer_of(environ, "memory", "info")
    assert told["live_run"] is None
    assert told["gpus"][0]["processes"][0]["used_bytes"] == 700 * MIB
    assert told["gpus"][0]["used_bytes"] == 10960 * MIB
    assert told["host"]["total_bytes"] > told["host"]["available_bytes"] > 0
    code, shown = run_at_a_terminal([*COMMAND, "memory", "info"], environ)
    assert code == 0
    assert "index  name" in shown
    none = run(machine_with().environment(), "memory", "info").stdout.splitlines()
    assert none[0] == "no NVIDIA GPU on this machine (driver 570.86.15)"
    assert none[1].startswith("host memory: ")


@pytest.mark.parametrize(
    ("exported", "value"),
    [
        ("", "expandable_segments:True"),
        (
            "max_split_size_mb:64,x:$(touch oops) 'y'",
            "max_split_size_mb:64,x:$(touch oops) 'y',expandable_segments:True",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_a_shell_can_evaluate_enable(exported, value):
    """Programs get the setting as JSON."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    environ |= {VARIABLE: exported} if exported else {}
    line = f'eval "$({" ".join(COMMAND)} memory enable)"; echo "${VARIABLE}"'
    done = subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{value}\n", "")
    told = answer_of(environ, "memory", "enable")
    assert (told["variable"], told["value"]) == (VARIABLE, value)


# --- a live run ---


@pytest.fixture
def live(own_trainers):
    """A run that trains until it is stopped."""
    process = own_trainers.start("holds_memory_until_stopped")
    try:
        journal = own_trainers.run_dir / "journal.jsonl"

        def has_ended_or_trains():
            if process.poll() is not None:
                return True
            return journal.exists() and '"training_started"' in journal.read_text()

        wait_until(has_ended_or_trains, "the trainer is at work")
        assert process.poll() is None, process.communicate()
        yield own_trainers
    finally:
        process.send_signal(signal.SIGTERM)
        own_trainers.end(process)


def test_a_live_run_clears_memory_on_request(live):
    """It reports the figures before and after."""
    told = answer_of(live.environ, "memory", "info")
    assert told["live_run"]["after"]["allocated"] > 192 * MIB
    # what the trainer has put out of the collector's reach stays, until force
    plain = answer_of(live.environ, "memory", "clear", "--run", str(live.run_dir))
    assert plain["held"] == []
    forced = answer_of(live.environ, "memory", "clear", "--force", "--run", plain["run"])
    assert forced["before"]["allocated"] - forced["after"]["allocated"] > 100 * MIB
    assert "MiB float32" in forced["held"][0]
    reset = answer_of(live.environ, "memory", "reset")
    assert reset["after"]["peak"] < reset["before"]["peak"]
    limited = answer_of(live.environ, "memory", "fraction", "0.9")
    assert 0 < limited["limit"] < limited["after"]["total"]
    for number in (1, 2):
        shot = answer_of(live.environ, "memory", "snapshot")
        assert shot["written"] == [str(live.run_dir / f"memory-tensors-{number}.json")]
        assert "no CUDA in this process, so there is no snapshot" in shot["sentence"]
        tensors = json.loads(Path(shot["written"][0]).read_text())
        assert tensors[0]["shape"] == [16 * MIB]
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
    for arguments in (("memory", "info"), ("memory", "reset")):
        code, shown = run_at_a_terminal([*COMMAND, *arguments], live.environ)
        assert code == 0, shown
        assert "host memory: " in shown, arguments
        assert "\nallocated " in shown, arguments


@pytest.mark.parametrize(
    ("verb", "options", "line"),
    [
        ("memory_info", {"loud": 1}, "memory_info has no option loud: it has none"),
        ("memory_clear", {"forced": True}, "memory_clear has no option forced: accepted is force"),
        ("memory_eat", {}, "no such request: memory_eat; accepted are memory_info, "),
        ("memory_clear", {"force": "yes"}, "force='yes': accepted is true or false"),
        ("memory_fraction", {}, "the option fraction is missing"),
        ("memory_fraction", {"fraction": 2}, "fraction=2: accepted is a number over 0, up to 1"),
        ("memory_snapshot", {}, "[Errno 2] No such file"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(tmp_path, verb, options, line):
    with pytest.raises((ValueError, OSError), match="^" + re.escape(line)) as refused:
        perform(verb, options, tmp_path / "missing")
    assert "\n" not in str(refused.value)
