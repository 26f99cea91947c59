"""Trainers whose memory is what the simulated NVML says of its process."""

from robust_train.attempt.run import live_of
from robust_train.model.events import MicroBatchChanged
from trainers import is_ready, saves, steps, waits_for_the_go


def holds_memory(cfg, run):
    """Take twelve steps once the test has seen the process, save, and wait."""
    is_ready()
    waits_for_the_go()
    for _ in steps(run, 12):
        pass
    saves(run, "twelve", 12)
    waits_for_the_go("2")


def runs_out_in_a_step(cfg, run):
    """Compute a step in smaller parts once the test has let others take memory."""
    is_ready()
    waits_for_the_go()
    for step in steps(run, 12):
        if step == 11:
            live_of(run).reports.send(MicroBatchChanged(step, True, 8, "memory", after=4))
    waits_for_the_go("2")
