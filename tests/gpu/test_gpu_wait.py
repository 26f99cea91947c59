"""Waiting for a GPU, on a clock that the test turns."""

import math
import sys
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

FULL = GpuInfo("GPU-full", "A100", 0, "00000000:01:00.0", 100 * MIB, 10 * MIB, 90 * MIB)
FREE = replace(FULL, free_bytes=90 * MIB)
OTHER = replace(FREE, uuid="GPU-other", index=1, pci_bus_id="1", free_bytes=60 * MIB)
BARRED = replace(FREE, compute_mode="prohibited", unusable="compute mode is prohibited")
OWNED = replace(FREE, compute_mode="exclusive_process", unusable="pid 7 owns it")
HELD = replace(FULL, processes=(GpuProcess(2**30, 80 * MIB),))
SMALL = replace(FULL, uuid="GPU-small", index=1, total_bytes=20 * MIB)
BUSY = replace(FULL, uuid="GPU-busy", index=2, pci_bus_id="2")
SLICES = [replace(FREE, uuid=f"MIG-{n}", parent_uuid=FREE.uuid) for n in range(2)]
REQUEST = GpuRequest(min_bytes=50 * MIB, timeout_seconds=100.0, interval_seconds=30.0)


class Story:
    """GPUs that change with time, on a clock that only sleeping turns.

    Args:
        scenes: what is visible from which second on.
    """

    def __init__(self, scenes):
        self.scenes = scenes
        self.now = 0.0
        self.looks = []
        self.process_lists = 0
        self.said = []

    def read(self, processes):
        if processes:
            self.process_lists += 1
        else:
            self.looks.append(self.now)
        return [scene for since, scene in sorted(self.scenes.items()) if since <= self.now][-1]

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def wait(self, **changes):
        request = replace(REQUEST, **changes)
        with mock.patch.object(waiting, "time", SimpleNamespace(monotonic=lambda: self.now)):
            queue = HostQueue(None, self.read)
            return Waiting(request, queue, self.said.append, self.sleep).run()


def always(*gpus):
    return Story({0: Visible(gpus)})


@pytest.mark.parametrize(
    ("scenes", "changes", "gets", "looks"),
    [
        ({0: (FULL, FREE)}, {}, (FREE,), [0, 0]),
        ({0: (FULL,), 45: (FREE,)}, {}, (FREE,), [0, 0, 30, 60]),
        ({0: (OWNED,), 30: (FREE,)}, {}, (FREE,), [0, 0, 30]),
        ({0: (FREE, OTHER)}, {"only": frozenset({OTHER.uuid})}, (OTHER,), [0, 0]),
        ({0: (FREE, BUSY), 45: (FREE, BUSY, OTHER)}, {"count": 2}, (FREE, OTHER), [0, 0, 30, 60]),
        ({0: SLICES}, {}, (SLICES[0],), [0, 0]),
    ],
)
def test_the_first_look_takes_a_freed_gpu(scenes, changes, gets, looks):
    """The first look after what was requested became free."""
    story = Story({since: Visible(tuple(gpus)) for since, gpus in scenes.items()})
    assert story.wait(**changes) == gets
    assert story.looks == looks
    assert (story.process_lists, len(story.said)) == (0, 0) or story.now > 0


@pytest.mark.parametrize(
    ("visible", "changes", "reason"),
    [
        (Visible(inventory=Inventory(problem="no NVIDIA driver")), {}, "no NVIDIA driver"),
        (Visible(hidden_on_purpose=True), {}, "hides every GPU"),
        (Visible(warning="the entry 'x' is wrong"), {}, "the entry 'x' is wrong"),
        (Visible(), {}, "no GPU is visible"),
        (Visible((BARRED,)), {}, "compute mode is prohibited"),
        (Visible((SMALL, FULL)), {"min_bytes": 200 * MIB}, "200 MiB"),
        (
            Visible((SMALL, FULL)),
            {"min_bytes": 200 * MIB},
            "GPU 0 (A100, GPU-full…); ask for at most min_gpu_memory_mb=100",
        ),
        (Visible((HELD,)), {"timeout_seconds": 0.0}, "no GPU was available now: GPU 0: 10 of 50"),
        (Visible((FREE,)), {"only": frozenset({"GPU-absent"})}, "GPU-absent"),
        # CUDA shows one of them to a process, and no whole GPU beside it
        (Visible(tuple(SLICES)), {"count": 2}, "num_gpus=2: the GPUs here are MIG slices"),
        (
            Visible((*SLICES, FREE)),
            {"count": 2},
            "num_gpus=2: only 1 GPU here could ever give 50 MiB (MIG slices do not count for ",
        ),
    ],
)
def test_futile_or_forbidden_waits_are_refused_immediately(visible, changes, reason):
    story = Story({0: visible})
    answer = story.wait(**changes)
    assert (story.now, story.said) == (0, [])
    assert reason in answer.reason


def test_a_timeout_names_the_obstacles():
    story = always(FULL)
    answer = story.wait()
    assert "within 1:40" in answer.reason
    assert "GPU 0: 10 of 50 MiB free" in answer.reason
    # the last look is at the deadline
    assert story.looks == [0, 0, 30, 60, 90, 100]
    late = always(FREE, BUSY).wait(count=2, timeout_seconds=1)
    assert late.reason.startswith("no 2 GPUs were available within 0:01: 1 of 2 GPUs")


@given(timeout=st.floats(0, 500), interval=st.floats(0.5, 1000))
def test_waiting_never_overshoots_its_deadline(timeout, interval):
    story = always(FULL)
    assert isinstance(story.wait(timeout_seconds=timeout, interval_seconds=interval), NoGpu)
    assert story.now == pytest.approx(timeout)


@pytest.mark.parametrize(("interval", "is_open"), [(30.0, False), (0.5, True)])
def test_distant_polls_leave_no_nvml_session_open(interval, is_open, monkeypatch):
    """An open session would block a reset of any GPU."""
    nvml = mock.Mock(NVMLError=OSError)
    nvml.nvmlDeviceGetCount.return_value = 0
    nvml.nvmlSystemGetCudaDriverVersion.return_value = None
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    inventory.forget_session()
    seen = set()

    class WithASession(Story):
        def read(self, processes):
            inventory.read_inventory()
            return super().read(processes)

        def sleep(self, seconds):
            seen.add(inventory.known_session() is not None)
            super().sleep(seconds)

    try:
        WithASession(always(FULL).scenes).wait(timeout_seconds=60, interval_seconds=interval)
    finally:
        inventory.forget_session()
    assert seen == {is_open}


def test_each_look_lists_processes_once():
    """The time left counts down."""
    story = always(FULL)
    story.wait(timeout_seconds=4, interval_seconds=2)
    assert story.process_lists == len(story.looks) - 1 == 3
    assert [round(status.seconds_left) for status in story.said] == [4, 3, 2, 1]
    assert [status.checks for status in story.said] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("gpus", "changes", "start", "end"),
    [
        (
            (HELD,),
            {"timeout_seconds": 3700},
            "waiting for a GPU, 1:01:40 left: GPU 0: 10 of 50 MiB free, ",
            "pid 1073741824 80 MiB",
        ),
        (
            (FREE, BUSY),
            {"count": 2},
            "waiting for a GPU, 1:40 left: 1 of 2 GPUs available; GPU 2: 10 of 50 MiB free",
            "",
        ),
    ],
)
def test_waiting_explains_what_and_for_whom(gpus, changes, start, end):
    """What is waited for, for how long, and who holds it."""
    story = always(*gpus)
    story.wait(**changes)
    sentence = story.said[0].sentence()
    assert sentence.startswith(start)
    assert sentence.endswith(end)
    line = WaitStatus(7, 1, "GPU 0: taken, " + "x" * 200, position=2).sentence()
    assert line.startswith("2nd in queue, 0:07 left: GPU 0: taken, x")
    assert len(line) == 120
    assert WaitStatus(math.inf, 1, "kept", position=1).sentence() == "1st in queue: kept"


def test_gpus_that_vanish_while_waiting_may_come_back():
    gone = Visible(inventory=Inventory(problem="driver reset"))
    story = Story({0: Visible((FULL,)), 20: gone, 50: Visible((FREE,))})
    assert story.wait() == (FREE,)
    assert any("driver reset" in status.sentence() for status in story.said)
