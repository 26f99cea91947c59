"""Trainers for tests of the interpreters that run them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from trainers import waits_for_the_go


def hides_a_helper(cfg, run):
    """Start a process that nothing but its ancestors shows to be of the job."""
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    pids = f"attempt {os.getpid()}\nhelper {helper.pid}\n"
    Path(os.environ["PIDS_FILE"]).write_text(pids)
    while run.attempt == 1 and not run.stop_requested:
        time.sleep(0.05)


def waits_for_the_standby(cfg, run):
    """Train until the standby has imported a library, and fail; the retry looks whether it has."""
    if run.attempt > 1:
        return {"was_there": "PIL.Image" in sys.modules}
    import PIL.Image  # noqa: F401

    run.started(0)
    run.progress(1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        launcher = psutil.Process().parent()
        for one in launcher.children():
            maps = Path(f"/proc/{one.pid}/maps").read_text()
            if one.pid != os.getpid() and "/PIL/_imaging" in maps:
                raise RuntimeError("NCCL error: remote process exited or there was a network error")
        time.sleep(0.1)
    raise AssertionError("no standby")


def meets_after_a_foreign_byte(cfg, run):
    """Tell where the store listens; once a stranger has written to it, meet the other rank."""
    import torch
    import torch.distributed as dist

    if run.rank == 0:
        Path(os.environ["PORT_FILE"]).write_text(os.environ["MASTER_PORT"])
    waits_for_the_go()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)
