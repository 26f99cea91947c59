"""Trainers whose attempts fail as a test's script says."""

import json
import os
import signal
import time
from pathlib import Path


def waits_for_the_go():
    """Not that of ``trainers``: benchmarks have a module of that name."""
    while not Path(os.environ["GO_FILE"]).exists():
        time.sleep(0.01)


def fails_by_script(cfg, run):
    """Does what the script in the environment says for this attempt's number, then succeeds.

    A line is ``<step> <message>``: progress to that step (``-``: training does not even begin),
    then an error with that message; the message ``worker`` kills a data-loader worker instead.
    """
    lines = Path(os.environ["FAILURES_FILE"]).read_text().splitlines()
    with Path(os.environ["ATTEMPTS_FILE"]).open("a") as file:
        given = {
            "gpu": os.environ["CUDA_VISIBLE_DEVICES"] or "cpu",
            "batch_size": cfg.training.batch_size,
            "num_workers": cfg.training.num_workers,
            "prefetch_factor": cfg.training.prefetch_factor,
            "time": time.monotonic(),
        }
        file.write(json.dumps(given) + "\n")
    if run.attempt > len(lines):
        return "trained"
    step, _, message = lines[run.attempt - 1].partition(" ")
    if step != "-":
        run.started(0)
        run.progress(int(step))
    if message == "worker":
        import torch

        workers = cfg.training.num_workers
        list(torch.utils.data.DataLoader(_KillsItsWorker(), num_workers=workers))
    raise RuntimeError(message)


def fails_by_script_beside_torch(cfg, run):
    """The same; says which settings torch's allocator has."""
    import torch

    with Path(os.environ["ALLOCATOR_FILE"]).open("a") as file:
        file.write(f"{torch._C._accelerator_getAllocatorSettings()}\n")
    return fails_by_script(cfg, run)


def fails_by_script_when_told(cfg, run):
    """Fail by the script once the go file exists; the launcher sees memory change before that."""
    if run.attempt == 1:
        Path(os.environ["ATTEMPTS_FILE"]).touch()
        waits_for_the_go()
    return fails_by_script(cfg, run)


def is_crowded_out(cfg, run):
    """Waits for the go file; its first attempt then gets the driver's own error."""
    Path(os.environ["READY_FILE"]).touch()
    waits_for_the_go()
    run.progress(1)
    if run.attempt == 1:
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of "
            "139.00 GiB of which 96.00 MiB is free. Including non-PyTorch memory, this process has "
            "4.00 GiB memory in use. 132.05 GiB allowed; Of the allocated memory 3.75 GiB is "
            "allocated by PyTorch, and 0.00 MiB is reserved by PyTorch but unallocated."
        )
    return "has room"


class _KillsItsWorker:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import torch

        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def trains_on_half(cfg, run):
    """Has memory for half of the batch; it leaves accumulation to nobody."""
    size = cfg.training.batch_size
    run.started(0)
    if run.attempt == 1:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B")
    run.progress(1)
    return size


def trains_on_half_and_accumulates(cfg, run):
    """The same, with as many batches a step as it is given."""
    return cfg.training.gradient_accumulation_steps * trains_on_half(cfg, run)
