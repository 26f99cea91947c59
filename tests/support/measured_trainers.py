"""A trainer whose memory is what the simulated NVML says of its process."""

from trainers import is_ready, saves, steps, waits_for_the_go


def holds_memory(cfg, run):
    """Take twelve steps once the test has seen the process, save, and wait."""
    is_ready()
    waits_for_the_go()
    for _ in steps(run, 12):
        pass
    saves(run, "twelve", 12)
    waits_for_the_go("2")
