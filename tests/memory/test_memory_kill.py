"""robust-train memory kill, on real processes that the simulated NVML lists."""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm
from another_user import needs_root
from robust_train.cli.memory import choose_targets, end_all
from robust_train.gpu import processes
from robust_train.gpu.processes import CudaProcess, list_cuda_processes, started_at
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from simulated_nvml import Gpu
from terminal import run_at_a_terminal
from world import is_running, wait_until

COMMAND = [sys.executable, "-m", "robust_train.cli.main", "memory", "kill"]

# what holds a GPU has CUDA's library loaded, which counts as the proof inside a container
HOLDER = """
import ctypes, signal, sys
ctypes.CDLL("libcuda.so.1")
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def machine(cuda_machine_with):
    return cuda_machine_with(Gpu(), Gpu())


@pytest.fixture
def start(machine):
    started = []

    def begin(*words):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *words],
            env=machine.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def listed(machine, start):
    """A process that NVML lists."""
    process = start()
    machine.update(0, compute=[(process.pid, 700)])
    return process


def run(machine, *arguments):
    return warm.robust_train("memory", "kill", *arguments, environ=machine.environment())


@pytest.mark.parametrize(
    ("answer", "exit_code"), [("y\n", 0), ("n\n", 1), ("yess\n", 1), ("\x04", 1), ("\x03", 130)]
)
def test_own_cuda_processes_end_after_confirmation(machine, listed, answer, exit_code):
    """They are shown before the user says yes."""
    machine.update(1, compute=[(listed.pid, 100)])
    ask = "end this process? [y/N]"
    code, shown = run_at_a_terminal(COMMAND, machine.environment(), ask=ask, answer=answer)
    assert code == exit_code, shown
    row = next(line for line in shown.splitlines() if str(listed.pid) in line)
    assert "0, 1" in row
    assert "800" in row
    assert "Traceback" not in shown
    if exit_code == 0:
        assert f"(pid {listed.pid}) has ended" in shown
        assert listed.wait(timeout=10) == -signal.SIGTERM
    else:
        assert "nothing was ended" in shown or exit_code == 130
        assert listed.poll() is None


def test_a_pipe_has_to_pass_yes(machine, listed):
    done = run(machine)
    assert done.returncode == 2
    assert "pass --yes" in done.stderr
    done = run(machine, "--dry-run")
    assert done.returncode == 0
    assert "no signal was sent" in done.stdout
    machine.update(0, compute=[(listed.pid, None)])
    (told,) = json.loads(run(machine, "--dry-run", "--json").stdout)["processes"]
    assert (told["pid"], told["used_bytes"], told["result"]) == (listed.pid, None, None)
    assert listed.poll() is None
    done = run(machine, "--yes")
    assert done.returncode == 0
    assert listed.wait(timeout=10) == -signal.SIGTERM
    header, row, _ = done.stdout.splitlines()
    assert header.split() == ["pid", "user", "command", "GPUs", "MiB"]
    assert row.split()[0] == str(listed.pid)
    assert "\x1b" not in done.stdout


def test_kill_spares_what_started_it(machine):
    """It does not show it either."""
    machine.update(0, compute=[(os.getpid(), 700)])
    done = run(machine, "--yes")
    assert done.returncode == 0
    assert done.stdout == "no CUDA process of yours runs on this machine's GPUs\n"
    done = run(machine, "--yes", "--pid", str(os.getpid()))
    assert done.returncode == 1
    assert "one of its parents" in done.stderr


def test_a_wrong_process_id_ends_no_process(machine, start, listed):
    """What is not a CUDA process is refused, and then none of the others is ended."""
    unlisted, drawing = start(), start()
    machine.update(0, graphics=[(drawing.pid, 1)])
    named = [word for p in (unlisted, drawing, listed) for word in ("--pid", str(p.pid))]
    done = run(machine, "--yes", "--json", *named)
    assert done.returncode == 1
    refused = {r["pid"]: r["reason"] for r in json.loads(done.stdout)["refused"]}
    assert "NVML does not list it" in refused[unlisted.pid]
    assert "only draws" in refused[drawing.pid]
    assert listed.pid not in refused
    assert all(p.poll() is None for p in (unlisted, drawing, listed))
    # and unnamed, those who only draw are left alone
    done = run(machine, "--dry-run")
    assert str(listed.pid) in done.stdout
    assert str(drawing.pid) not in done.stdout


@needs_root
def test_root_ends_only_named_foreign_processes(machine):
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            ctypes.CDLL(str(machine.libraries / "libcuda.so.1"))
            os.setresuid(12345, 12345, 12345)
            signal.pause()
        os._exit(1)
    try:
        machine.update(0, compute=[(pid, 1)])
        wait_until(lambda: Path(f"/proc/{pid}").stat().st_uid == 12345, "it is another user's")
        assert "no CUDA process of yours" in run(machine, "--yes").stdout
        assert is_running(pid)
        done = run(machine, "--yes", "--pid", str(pid))
        assert done.returncode == 0, done.stderr
        assert "12345" in done.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM


def test_kill_explains_a_machine_without_gpus(cuda_machine_with):
    """The explanation is a sentence."""
    done = run(cuda_machine_with(), "--yes", "--json")
    assert done.returncode == 1
    assert "no NVIDIA GPU" in json.loads(done.stdout)["error"]


def test_only_stubborn_processes_are_killed(start):
    """Who ignores SIGTERM; no other process is signalled."""

    def cuda_process(process):
        started = started_at(process.pid)
        return CudaProcess(process.pid, os.getuid(), "c", started, (0,), None)

    polite, stubborn, innocent, gone = start(), start("stubborn"), start(), start()
    of_an_earlier_one = replace(cuda_process(innocent), started=cuda_process(innocent).started - 1)
    ending = [cuda_process(polite), cuda_process(stubborn), of_an_earlier_one, cuda_process(gone)]
    gone.kill()
    gone.wait()
    assert [*end_all(ending, 0.5).values()] == ["ended", "killed", "gone", "gone"]
    assert polite.wait(timeout=10) == -signal.SIGTERM
    assert stubborn.wait(timeout=10) == -signal.SIGKILL
    assert innocent.poll() is None


# --- decisions ---

PROCESSES = st.lists(
    st.builds(
        CudaProcess,
        pid=st.integers(1, 12),
        uid=st.sampled_from([0, 1000, 1001]),
        command=st.just("c"),
        started=st.just(1.0),
        gpus=st.just((0,)),
        used_bytes=st.none(),
    ),
    unique_by=lambda process: process.pid,
)
PIDS = st.lists(st.integers(1, 14))


@given(PROCESSES, PIDS, st.sampled_from([0, 1000]), st.frozensets(st.integers(1, 14)))
def test_nobody_but_the_permitted_is_ever_chosen(listed, named, uid, ancestors):
    targets, refusals = choose_targets((listed, {}), named, uid, ancestors)
    for target in targets:
        assert target in listed
        assert target.pid not in ancestors
        assert target.uid == uid or (uid == 0 and target.pid in named)
        assert not named or target.pid in named
    # whoever was named is either chosen or refused with a reason
    assert set(named) == {t.pid for t in targets} | set(refusals) or not named
    assert all(refusals.values())


def test_containers_mean_processes_that_use_cuda(monkeypatch, tmp_path):
    """The numbers that NVML lists there may be those of the host."""
    monkeypatch.setattr(processes, "sees_host_pids", lambda: False)
    assert not processes.has_this_number_here(os.getpid())
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(bytes(4096))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert processes.has_this_number_here(os.getpid())


def test_containers_know_cuda_processes_by_library(monkeypatch):
    """A process without CUDA's library is not one."""
    monkeypatch.setattr(processes, "sees_host_pids", lambda: False)
    on_it = (GpuProcess(os.getpid(), 5),)
    inventory = Inventory(gpus=(GpuInfo("GPU-0", "A", 0, "0", 9, 9, 0, processes=on_it),))
    listed, others = list_cuda_processes(inventory)
    assert not listed
    assert "outside of this container" in others[os.getpid()]
    monkeypatch.setattr(processes, "has_library", lambda pid, name: True)
    (process,), _ = list_cuda_processes(inventory)
    assert (process.uid, process.used_bytes) == (os.getuid(), 5)
