"""What slows an attempt down is named while it lasts."""

import getpass
import json
import os
from dataclasses import replace

from robust_train.features.slow.launcher import SlowWatch
from robust_train.features.slow.record import Slow
from robust_train.model.events import MicroBatchChanged, SpeedMeasured
from robust_train.model.spec import Speed
from simulated_nvml import Gpu

STEADY = Speed(100, 0.2, 0.3, seconds_per_step_now=0.2)

OF_A_GPU = """
import json, os, subprocess, sys
from robust_train.gpu import processes
from robust_train.gpu.inventory import read_inventory
from robust_train.features.slow.launcher import SlowWatch, _describe_gpu_problems
processes.sees_host_pids = lambda: True
print(json.dumps(_describe_gpu_problems(read_inventory().gpus)))
"""


OF_A_NEIGHBOUR = """
import subprocess, sys, time
trainer = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
print(trainer.pid, flush=True)
while not (inventory := read_inventory()).gpus[0].processes:
    time.sleep(0.02)
watch = SlowWatch(inventory.gpus[:1], print)
watch.poll()
print(json.dumps(_describe_gpu_problems(inventory.gpus[:1])))
trainer.kill()
"""


class Watched:
    """A watch, and what it has sent; ``now`` is its clock."""

    def __init__(self):
        self.now = 1000.0
        self.sent = []
        self.watch = SlowWatch((), self.sent.append, lambda: self.now)

    def trains(self, minutes, *ranks):
        """Train for some minutes; return the notes that are sent in that time."""
        before = len(self.sent)
        for _ in range(int(2 * minutes)):
            self.now += 30
            for rank, speed in enumerate(ranks):
                self.watch.on_event(SpeedMeasured(speed, rank))
            self.watch.poll()
        return self.sent[before:]


def test_a_long_wait_for_data_is_named():
    """It is measured for ten minutes, and named until it is over."""
    job = Watched()
    waiting = replace(STEADY, data_share=0.4)
    assert job.trains(9.5, waiting) == []
    (slow,) = job.trains(30, waiting)
    assert slow == Slow("data", "training waits for data 40 % of the time", 0.4)
    assert job.trains(1, STEADY) == [Slow()]
    assert job.trains(30, replace(STEADY, data_share=0.19)) == []
    assert job.trains(30, replace(STEADY, between_share=0.97)) == [], "that may be anything"


def test_the_rank_that_others_wait_for_is_named():
    ranks = [replace(STEADY, seconds_alone_per_step=s) for s in (0.2, 0.3, 0.2, 0.2)]
    (slow,) = Watched().trains(12, *ranks)
    assert (slow.what, slow.share) == ("rank 1", 0.333)


def test_nothing_is_explained_without_a_measurement():
    """Neither silence nor slow steps."""
    job = Watched()
    job.trains(5, replace(STEADY, data_share=0.5))
    assert job.trains(30) == [], "a validation, perhaps"
    job.trains(5, STEADY)
    slower = replace(STEADY, seconds_per_step_now=0.4)
    assert job.trains(30, slower) == [], "no GPU was asked"
    job.watch.on_event(MicroBatchChanged(1, True, 8, "…", after=4))
    assert job.trains(30, slower) == []


def test_slowing_by_heat_or_power_is_named(machine_with):
    machine = machine_with(Gpu(throttle=0x20 | 0x80), Gpu(throttle=0x1), Gpu())
    assert machine.python(OF_A_GPU) == {"GPU 0": "GPU 0 is throttled (too hot, power brake)"}


def test_a_neighbour_on_the_gpu_is_named(machine_with):
    """This needs the numbers of the job's own processes."""
    machine = machine_with(Gpu(), Gpu())
    imports = OF_A_GPU[: OF_A_GPU.index("print")]
    process = machine.start(imports + OF_A_NEIGHBOUR)
    trainer, neighbour = int(process.stdout.readline()), os.getpid()
    machine.update(1, compute=[(trainer, 9), (neighbour, 9)])
    machine.update(0, compute=[(trainer, 900), (neighbour, 900)])
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "the trainer computes on GPU 1, which is not reserved for it" in errors
    user = getpass.getuser()
    text = f"process {neighbour} of {user} computes on GPU 0 too"
    assert json.loads(output.splitlines()[-1]) == {f"process {neighbour}": text}
