"""robust-train memory kill, on real processes that the simulated NVML lists."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warm
from robust_train.cli.memory import choose, end_all
from robust_train.gpu import processes
from robust_train.gpu.processes import (
    CudaProcess,
    CudaProcesses,
    list_cuda_processes,
    started_at,
)
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from simulated_nvml import Gpu, Machine
from terminal import run_at_a_terminal
from world import is_running, wait_until

MachineWith = Callable[..., Machine]

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
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(machine: Machine, *words: str, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *words],
            env=machine.environment(),
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def run(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.robust_train("memory", "kill", *arguments, environ=machine.environment())


def test_own_cuda_processes_are_shown_and_ended_once_the_user_says_yes(cuda_machine_with, start):
    machine = cuda_machine_with(Gpu(), Gpu())
    process = start(machine)
    machine.update(0, compute=[(process.pid, 700)])
    machine.update(1, compute=[(process.pid, 100)])
    code, shown = run_at_a_terminal(
        COMMAND, machine.environment(), ask="end this process? [y/N]", answer="y\n"
    )
    assert code == 0, shown
    row = next(line for line in shown.splitlines() if str(process.pid) in line)
    assert "0, 1" in row
    assert "800" in row
    assert f"(pid {process.pid}) has ended" in shown
    assert process.wait(timeout=10) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("answer", "exit_code"), [("n\n", 1), ("yess\n", 1), ("\x04", 1), ("\x03", 130)]
)
def test_any_other_answer_ends_nothing(cuda_machine_with, start, answer, exit_code):
    machine = cuda_machine_with(Gpu())
    process = start(machine)
    machine.update(0, compute=[(process.pid, 700)])
    code, shown = run_at_a_terminal(COMMAND, machine.environment(), ask="[y/N]", answer=answer)
    assert code == exit_code
    assert "nothing was ended" in shown or exit_code == 130
    assert "Traceback" not in shown
    assert process.poll() is None


def test_a_pipe_has_to_pass_yes(cuda_machine_with: MachineWith, start) -> None:
    machine = cuda_machine_with(Gpu())
    process = start(machine)
    machine.update(0, compute=[(process.pid, 700)])
    done = run(machine)
    assert done.returncode == 2
    assert "pass --yes" in done.stderr
    assert process.poll() is None
    done = run(machine, "--dry-run")
    assert done.returncode == 0
    assert "no signal was sent" in done.stdout
    assert process.poll() is None
    machine.update(0, compute=[(process.pid, None)])
    (told,) = json.loads(run(machine, "--dry-run", "--json").stdout)["processes"]
    assert (told["pid"], told["used_bytes"], told["result"]) == (process.pid, None, None)
    done = run(machine, "--yes")
    assert done.returncode == 0
    assert process.wait(timeout=10) == -signal.SIGTERM
    header, row, _ = done.stdout.splitlines()
    assert header.split() == ["pid", "user", "command", "GPUs", "MiB"]
    assert row.split()[0] == str(process.pid)
    assert "\x1b" not in done.stdout


def test_who_ignores_sigterm_is_killed_and_others_are_not(cuda_machine_with, start):
    machine = cuda_machine_with(Gpu())
    polite, stubborn, bystander = start(machine), start(machine, "stubborn"), start(machine)
    listed = [_process(one.pid, started_at(one.pid) or 0) for one in (polite, stubborn)]
    assert [*end_all(listed, 0.5).values()] == ["ended", "killed"]
    assert polite.wait(timeout=10) == -signal.SIGTERM
    assert stubborn.wait(timeout=10) == -signal.SIGKILL
    assert bystander.poll() is None


def test_what_it_was_started_from_is_neither_shown_nor_ended(cuda_machine_with):
    machine = cuda_machine_with(Gpu(compute=[(os.getpid(), 700)]))
    done = run(machine, "--yes")
    assert done.returncode == 0
    assert done.stdout == "no CUDA process of yours runs on this machine's GPUs\n"
    done = run(machine, "--yes", "--pid", str(os.getpid()))
    assert done.returncode == 1
    assert "what it was started from" in done.stderr


def test_what_is_no_cuda_process_is_refused_and_then_nobody_is_ended(cuda_machine_with, start):
    machine = cuda_machine_with(Gpu())
    unlisted, drawing, computing = start(machine), start(machine), start(machine)
    machine.update(0, compute=[(computing.pid, 1)], graphics=[(drawing.pid, 1)])
    named = [word for p in (unlisted, drawing, computing) for word in ("--pid", str(p.pid))]
    done = run(machine, "--yes", "--json", *named)
    assert done.returncode == 1
    refused = {r["pid"]: r["reason"] for r in json.loads(done.stdout)["refused"]}
    assert "NVML does not list it" in refused[unlisted.pid]
    assert "only draws" in refused[drawing.pid]
    assert computing.pid not in refused
    assert all(p.poll() is None for p in (unlisted, drawing, computing))
    # and unnamed, those who only draw are left alone
    done = run(machine, "--dry-run")
    assert str(computing.pid) in done.stdout
    assert str(drawing.pid) not in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="starts a process as another user: needs root")
def test_root_ends_others_processes_only_if_they_are_named(cuda_machine_with, tmp_path):
    machine = cuda_machine_with(Gpu())
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            import ctypes

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


def test_a_machine_without_gpus_is_told_in_a_sentence(machine_with: MachineWith) -> None:
    done = run(machine_with(), "--yes", "--json")
    assert done.returncode == 1
    assert "no NVIDIA GPU" in json.loads(done.stdout)["error"]


# --- decisions ----------------------------------------------------------------------------------

PROCESSES = st.lists(
    st.builds(
        CudaProcess,
        pid=st.integers(1, 12),
        uid=st.sampled_from([0, 1000, 1001]),
        user=st.just("u"),
        command=st.just("c"),
        started=st.just(1.0),
        gpus=st.just((0,)),
        used_bytes=st.none(),
    ),
    unique_by=lambda process: process.pid,
)
PIDS = st.lists(st.integers(1, 14))


@given(PROCESSES, PIDS, st.sampled_from([0, 1000]), st.frozensets(st.integers(1, 14)))
def test_nobody_but_the_permitted_is_ever_chosen(listed, named, uid, ancestors) -> None:
    targets, refusals = choose(CudaProcesses(tuple(listed), {}), named, uid, ancestors)
    for target in targets:
        assert target in listed
        assert target.pid not in ancestors
        assert target.uid == uid or (uid == 0 and target.pid in named)
        assert not named or target.pid in named
    # whoever was named is either chosen or refused with a reason
    assert set(named) == {t.pid for t in targets} | set(refusals) or not named
    assert all(refusals.values())


def _on_a_gpu(*processes: GpuProcess) -> Inventory:
    return Inventory(gpus=(GpuInfo("GPU-0", "A", 0, "0", 9, 9, 0, processes=processes),))


def test_in_a_container_a_process_without_cuda_s_library_is_no_cuda_process(monkeypatch):
    monkeypatch.setattr(processes, "sees_host_pids", lambda: False)
    inventory = _on_a_gpu(GpuProcess(os.getpid(), 5))
    listed = list_cuda_processes(inventory)
    assert not listed.processes
    assert "outside of this container" in listed.others[os.getpid()]
    monkeypatch.setattr(processes, "has_cuda_library", lambda pid: True)
    (process,) = list_cuda_processes(inventory).processes
    assert (process.uid, process.used_bytes) == (os.getuid(), 5)


# --- holding on to a process --------------------------------------------------------------------


def _process(pid: int, started: float) -> CudaProcess:
    return CudaProcess(pid, os.getuid(), "u", "c", started, (0,), None)


def test_a_number_that_another_process_has_now_is_never_signalled() -> None:
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        started = started_at(innocent.pid)
        assert started is not None
        other = _process(innocent.pid, started - 1)
        assert end_all([other], 0.1) == {other: "gone"}
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_a_process_that_ends_while_the_user_thinks_is_gone() -> None:
    process = subprocess.Popen(["sleep", "60"])
    listed = _process(process.pid, started_at(process.pid) or 0)
    process.kill()
    process.wait()
    assert end_all([listed], 5) == {listed: "gone"}
