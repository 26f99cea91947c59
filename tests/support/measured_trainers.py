"""Trainers whose memory is what the simulated NVML says of its process."""

import mmap
import os
import time
from pathlib import Path

from robust_train.attempt.run import live_of
from robust_train.model.events import MicroBatchChanged
from simulated_nvml.device import SharedDevice
from trainers import is_ready, saves, steps, waits_for_the_go


def holds_memory(cfg, run):
    """Take twelve steps once the test has seen the process, save, and wait."""
    is_ready()
    waits_for_the_go()
    for _ in steps(run, 12):
        pass
    saves(run, "twelve", 12)
    waits_for_the_go("2")


def holds_memory_of_a_library(cfg, run):
    """Do the same in a process that has mapped a file by the name of this library."""
    library = Path(os.environ["READY_FILE"]).with_name(cfg.trainer.library)
    library.write_bytes(bytes(4096))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        holds_memory(cfg, run)


def runs_out_in_a_step(cfg, run):
    """Compute a step in smaller parts once the test has let others take memory."""
    is_ready()
    waits_for_the_go()
    for step in steps(run, 12):
        if step == 11:
            live_of(run).reports.send(MicroBatchChanged(step, True, 8, "memory", after=4))
    waits_for_the_go("2")


def shares_a_gpu(cfg, run):
    """Hold memory and train until another job holds memory on the same GPU."""
    device = SharedDevice(Path(os.environ["SIMULATED_NVML_STATE"]))
    uuid = os.environ["CUDA_VISIBLE_DEVICES"]
    device.allocate(uuid, 3000)
    for step in steps(run, pause=0.05):
        if step == 12:
            saves(run, "twelve", 12)
        if device.used()[uuid] > 3000:
            break
    # The other one looks as often as this one.
    time.sleep(2)
    device.release()
    return 1.0
