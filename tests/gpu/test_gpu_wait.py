"""Waiting for a GPU: on a clock that the test turns, and in real programs on a machine that the
test changes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_train.gpu import inventory
from robust_train.gpu.visible import Visible
from robust_train.model.gpu import GpuInfo, GpuProcess, Inventory
from robust_train.queue import waiting
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.waiting import NoGpu, Waiting, WaitStatus
from robust_train.readable import MIB
from robust_train.report.status import LiveStatus
from simulated_nvml import Gpu, Machine

MachineWith = Callable[..., Machine]

FULL = GpuInfo("GPU-full", "A100", 0, "00000000:01:00.0", 100 * MIB, 10 * MIB, 90 * MIB)
FREE = replace(FULL, free_bytes=90 * MIB)
BARRED = replace(FREE, compute_mode="prohibited", unusable="compute mode is prohibited")
SMALL = replace(FULL, uuid="GPU-small", index=1, total_bytes=20 * MIB)
REQUEST = GpuRequest(min_bytes=50 * MIB, timeout_seconds=100.0, interval_seconds=30.0)


class Story:
    """GPUs that change with time, on a clock that only sleeping turns.

    Args:
        scenes: what is visible from which second on.
    """

    def __init__(self, scenes: dict[float, Visible]) -> None:
        self.scenes = scenes
        self.now = 0.0
        self.looks: list[float] = []
        self.process_lists = 0
        self.said: list[WaitStatus] = []

    def read(self, processes: bool) -> Visible:
        if processes:
            self.process_lists += 1
        else:
            self.looks.append(self.now)
        return [scene for since, scene in sorted(self.scenes.items()) if since <= self.now][-1]

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def wait(self, request: GpuRequest) -> tuple[GpuInfo, ...] | NoGpu:
        with mock.patch.object(waiting, "time", SimpleNamespace(monotonic=lambda: self.now)):
            queue = HostQueue.alone(self.read)
            return Waiting(request, queue, self.said.append, self.sleep).run()


def always(*gpus: GpuInfo) -> Story:
    return Story({0: Visible(gpus)})


def test_a_free_gpu_is_taken_at_once() -> None:
    story = always(FULL, FREE)
    assert story.wait(REQUEST) == (FREE,)
    assert (story.now, story.said, story.process_lists) == (0, [], 0)


def test_a_gpu_is_taken_at_the_first_look_after_it_became_free() -> None:
    story = Story({0: Visible((FULL,)), 45: Visible((FREE,))})
    assert story.wait(REQUEST) == (FREE,)
    assert story.looks == [0, 0, 30, 60]


def test_time_up_is_told_with_what_stood_in_the_way() -> None:
    story = always(FULL)
    answer = story.wait(REQUEST)
    assert isinstance(answer, NoGpu)
    assert answer.timed_out
    assert "within 1:40" in answer.reason
    assert "GPU 0: 10 of 50 MiB free" in answer.reason
    # the last look is at the deadline
    assert story.looks == [0, 0, 30, 60, 90, 100]


@given(timeout=st.floats(0, 500), interval=st.floats(0.5, 1000))
def test_waiting_never_overshoots_its_deadline(timeout: float, interval: float) -> None:
    story = always(FULL)
    answer = story.wait(replace(REQUEST, timeout_seconds=timeout, interval_seconds=interval))
    assert isinstance(answer, NoGpu)
    assert story.now == pytest.approx(timeout)


@pytest.mark.parametrize(("interval", "is_open"), [(30.0, False), (0.5, True)])
def test_between_two_polls_that_are_far_apart_no_nvml_session_is_open(
    interval, is_open, monkeypatch
):
    """An open one would block a reset of any GPU."""
    story = always(FULL)
    names = (
        "nvmlInit",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion",
        "nvmlMemory_v2",
    )
    nvml = SimpleNamespace(NVMLError=OSError, **dict.fromkeys(names, lambda: None))
    nvml.nvmlDeviceGetCount = lambda: 0
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    inventory.forget_session()
    seen: list[bool] = []

    def read(processes: bool) -> Visible:
        inventory.read_inventory()
        return story.read(processes)

    def sleep(seconds: float) -> None:
        seen.append(inventory.known_session() is not None)
        story.sleep(seconds)

    request = replace(REQUEST, timeout_seconds=60, interval_seconds=interval)
    try:
        with mock.patch.object(waiting, "time", SimpleNamespace(monotonic=lambda: story.now)):
            Waiting(request, HostQueue.alone(read), print, sleep).run()
    finally:
        inventory.forget_session()
    assert set(seen) == {is_open}


def test_processes_are_listed_once_per_look_and_the_time_left_counts_down() -> None:
    story = always(FULL)
    story.wait(replace(REQUEST, timeout_seconds=4, interval_seconds=2))
    assert story.process_lists == len(story.looks) - 1 == 3
    assert [round(status.seconds_left) for status in story.said] == [4, 3, 2, 1]
    assert [status.checks for status in story.said] == [1, 1, 2, 2]


def test_the_sentence_says_what_is_waited_for_how_long_and_who_holds_it() -> None:
    story = always(replace(FULL, processes=(GpuProcess(2**30, 80 * MIB),)))
    story.wait(replace(REQUEST, timeout_seconds=3700))
    sentence = story.said[0].sentence()
    assert sentence.startswith("waiting for a GPU, 1:01:40 left: GPU 0: 10 of 50 MiB free, ")
    assert sentence.endswith("pid 1073741824 80 MiB")


def test_what_no_gpu_could_ever_meet_is_refused_at_once_naming_the_largest() -> None:
    story = always(SMALL, FULL)
    answer = story.wait(replace(REQUEST, min_bytes=200 * MIB))
    assert isinstance(answer, NoGpu)
    assert not answer.timed_out
    assert "200 MiB" in answer.reason
    assert "GPU 0 (A100, GPU-full…); ask for at most min_gpu_memory_mb=100" in answer.reason
    assert story.now == 0


def test_an_exclusive_gpu_with_an_owner_is_waited_for() -> None:
    owned = replace(FREE, compute_mode="exclusive_process", unusable="pid 7 owns it")
    story = Story({0: Visible((owned,)), 30: Visible((FREE,))})
    assert story.wait(REQUEST) == (FREE,)


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        (Visible(inventory=Inventory(problem="no NVIDIA driver")), "no NVIDIA driver"),
        (Visible(hidden_on_purpose=True), "hides every GPU"),
        (Visible(warning="the entry 'x' is wrong"), "the entry 'x' is wrong"),
        (Visible(), "no GPU is visible"),
        (Visible((BARRED,)), "compute mode is prohibited"),
    ],
)
def test_a_machine_with_no_gpu_that_will_do_is_not_waited_on(visible: Visible, reason: str) -> None:
    story = Story({0: visible})
    answer = story.wait(REQUEST)
    assert isinstance(answer, NoGpu)
    assert reason in answer.reason
    assert story.now == 0


def test_gpus_that_vanish_while_waiting_may_come_back() -> None:
    story = Story(
        {
            0: Visible((FULL,)),
            20: Visible(inventory=Inventory(problem="driver reset")),
            50: Visible((FREE,)),
        }
    )
    assert story.wait(REQUEST) == (FREE,)
    assert any("driver reset" in status.sentence() for status in story.said)


def test_without_waiting_the_answer_is_there_at_once_and_says_who_holds_the_gpus() -> None:
    story = always(replace(FULL, processes=(GpuProcess(2**30, 80 * MIB),)))
    answer = story.wait(replace(REQUEST, wait=False))
    assert isinstance(answer, NoGpu)
    assert not answer.timed_out
    assert "pid 1073741824" in answer.reason
    assert (story.now, story.said) == (0, [])


def test_all_but_the_gpu_asked_for_are_left_alone() -> None:
    other = replace(FREE, uuid="GPU-other", free_bytes=60 * MIB)
    assert always(FREE, other).wait(replace(REQUEST, only=frozenset({other.uuid}))) == (other,)
    refused = always(FREE).wait(replace(REQUEST, only=frozenset({"GPU-absent"})))
    assert isinstance(refused, NoGpu)
    assert "GPU-absent" in refused.reason


def test_several_gpus_are_found_together_and_waited_for_in_one_sentence() -> None:
    other, third = (replace(FREE, uuid=f"GPU-{n}", index=n, pci_bus_id=n) for n in ("1", "2"))
    busy = replace(third, free_bytes=10 * MIB)
    story = Story({0: Visible((FREE, busy)), 45: Visible((FREE, busy, other))})
    assert story.wait(replace(REQUEST, count=2)) == (FREE, other)
    assert story.now == 60
    start = "waiting for a GPU, 1:40 left: 1 of 2 GPUs available; GPU 2: 10 of 50 MiB free"
    assert story.said[0].sentence().startswith(start)
    late = always(FREE, busy).wait(replace(REQUEST, count=2, timeout_seconds=1))
    assert isinstance(late, NoGpu)
    assert late.reason.startswith("no 2 GPUs were available within 0:01: 1 of 2 GPUs")
    line = WaitStatus(7, 1, "GPU 0: taken, " + "x" * 200, position=2).sentence()
    assert line.startswith("2nd in queue, 0:07 left: GPU 0: taken, x")
    assert len(line) == 120


def test_slices_of_a_gpu_are_nothing_for_a_job_of_several() -> None:
    """CUDA shows one of them to a process, and no whole GPU beside it."""
    slices = [replace(FREE, uuid=f"MIG-{n}", parent_uuid=FREE.uuid) for n in range(2)]
    assert always(*slices).wait(REQUEST) == (slices[0],)
    refused = always(*slices).wait(replace(REQUEST, count=2))
    assert isinstance(refused, NoGpu)
    assert refused.reason.startswith("num_gpus=2: the GPUs here are MIG slices")
    beside = always(*slices, FREE).wait(replace(REQUEST, count=2))
    assert isinstance(beside, NoGpu)
    only = "num_gpus=2: only 1 GPU here could ever give 50 MiB (MIG slices do not count for "
    assert beside.reason.startswith(only)


WAIT = """
import os, sys
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import visible_gpus
from robust_train.queue.host_queue import GpuRequest, HostQueue
from robust_train.queue.waiting import Waiting
request = GpuRequest(4000 * 1024**2, timeout_seconds=300, interval_seconds={interval})
try:
    def read(processes):
        return visible_gpus(read_inventory(processes=processes), os.environ)
    found = Waiting(
        request,
        HostQueue.alone(read),
        on_status=lambda status: print(status.sentence(), file=sys.stderr),
    ).run()
    print(found[0].uuid)
except KeyboardInterrupt:
    print("left")
"""


def test_a_waiting_program_takes_the_gpu_that_becomes_free(machine_with: MachineWith) -> None:
    machine = machine_with(
        Gpu(free_mib=100, compute=[(os.getpid(), 40000)]), Gpu(free_mib=100, total_mib=16000)
    )
    process = machine.start(WAIT.format(interval=0.05))
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("waiting for a GPU, ")
    assert "GPUs 0, 1: at most 100 of 4000 MiB free" in line
    assert f"pid {os.getpid()}" in line
    machine.update(1, free_mib=12000)
    out, _ = process.communicate(timeout=60)
    assert out.strip() == machine.uuid(1)


def test_without_a_terminal_each_look_gives_one_log_line(caplog):
    status = WaitStatus(60.0, checks=1, obstacles="busy", position=0)
    with caplog.at_level(logging.INFO, "robust_train"), LiveStatus(is_wanted=False) as live:
        for seconds_left, checks in ((60.0, 1), (59.0, 1), (58.0, 2)):
            live.log_waiting(replace(status, seconds_left=seconds_left, checks=checks))
    assert [record.message for record in caplog.records] == [
        "waiting for a GPU, 1:00 left: busy",
        "waiting for a GPU, 0:58 left: busy",
    ]
