"""Trainers as users write them, each with one property that a test needs."""

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from robust_train.model.errors import Interrupted
from robust_train.model.events import MemoryReported


def saves(run, name, step, text=""):
    """Write a checkpoint and report it."""
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / name
    path.write_text(text)
    run.checkpoint_saved(path, step)


def is_ready(*more_pids):
    """Tell the test who trains."""
    Path(os.environ["READY_FILE"]).write_text(" ".join(map(str, (os.getpid(), *more_pids))))


def may_go(suffix=""):
    return Path(os.environ["GO_FILE"] + suffix).exists()


def waits_for_the_go(suffix=""):
    while not may_go(suffix):
        time.sleep(0.01)


def what_it_was_given(cfg):
    torch = sys.modules.get("torch")
    return {
        "device": cfg.device,
        "batch_size": cfg.training.batch_size,
        "gradient_accumulation_steps": cfg.training.gradient_accumulation_steps,
        "num_workers": cfg.training.num_workers,
        "lr": cfg.training.lr,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda_started": torch is not None and torch.cuda.is_initialized(),
        "cwd": os.getcwd(),
        "parent": os.getppid(),
    }


def uses_run(cfg, run):
    return {
        "attempt": run.attempt,
        "resume_checkpoint": run.resume_checkpoint,
        "checkpoint_dir": str(run.checkpoint_dir),
    }


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def train(self, cfg):
        return self.factor


def plain(cfg):
    return 1


@functools.wraps(plain)
def decorated(cfg):
    return 2


scaled = functools.partial(Scaled.train, Scaled(4))


def has_a_bug(cfg):
    return _deep_down({})


def _deep_down(table):
    return table["a key that is not there"]


def within_a_budget(cfg):
    """Raises torch's own out-of-memory error where the batch is above the GPU's budget.

    The budgets come as JSON from the environment: UUID → largest batch; no entry: any batch.
    """
    budgets = json.loads(os.environ["BATCH_BUDGETS"])
    gpu = os.environ["CUDA_VISIBLE_DEVICES"] or "cpu"
    with Path(os.environ["ATTEMPTS_FILE"]).open("a") as file:
        file.write(f"{gpu} {cfg.training.batch_size} {os.getppid()}\n")
    if "GO_FILE" in os.environ:
        waits_for_the_go()
    if cfg.training.batch_size > budgets.get(gpu, 10**9):
        wanted = 2 + cfg.training.batch_size / 100
        raise RuntimeError(
            f"CUDA out of memory. Tried to allocate {wanted:.2f} GiB. GPU 0 has a total capacity "
            "of 15.78 GiB of which 1.20 GiB is free."
        )
    return "trained"


def resumes(cfg, run):
    """Saves a checkpoint at step 5, runs out of memory at the first attempt, then goes on.

    With DIES_OF in the environment it is killed by that signal instead.
    """
    if "ATTEMPTS_FILE" in os.environ:
        with Path(os.environ["ATTEMPTS_FILE"]).open("a") as file:
            file.write(f"{os.getppid()}\n")
    first_step = 0
    if run.resume_checkpoint is not None:
        first_step = int(Path(run.resume_checkpoint).read_text())
    run.started(first_step)
    for step in range(first_step + 1, 11):
        run.progress(step, total_steps=10)
        if step == 5:
            saves(run, "five", step, "5")
        if step == 7 and run.attempt == 1:
            if "DIES_OF" in os.environ:
                os.kill(os.getpid(), signal.Signals[os.environ["DIES_OF"]])
            raise MemoryError
    return first_step


def dies_of_segfault(cfg):
    ctypes.string_at(0)


def dies_of_sigkill(cfg):
    os.kill(os.getpid(), signal.SIGKILL)


def calls_sys_exit(cfg):
    sys.exit(3)


def calls_os_exit(cfg):
    os._exit(0)


def catches_everything_and_stops_politely(cfg, run):
    step = 0
    while True:
        step += 1
        if run.stop_requested:
            saves(run, f"step-{step}", step, str(step))
            raise Interrupted
        run.progress(step)
        is_ready()
        time.sleep(0.01)


def never_looks_whether_to_stop(cfg):
    try:
        is_ready()
        while True:
            time.sleep(0.01)
    finally:
        Path(os.environ["READY_FILE"] + ".cleaned").write_text("yes")


def does_not_stop_at_all(cfg):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "1000"])
    escaped = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    is_ready(helper.pid, escaped.pid)
    while True:
        time.sleep(0.01)


def prints(cfg):
    print("a line on stdout")
    print("a line on stderr", file=sys.stderr)
    os.write(1, b"straight to the descriptor\n")
    for step in range(3):
        print(f"\rstep {step}", end="")
    print()
    return sys.stdout.isatty(), sys.stderr.isatty()


def openmp_settings(cfg):
    """As they were when torch was loaded: what this process says now comes too late for that."""
    environ = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (pair.decode().partition("=") for pair in environ)
    return {name: value for name, _, value in pairs if name.startswith(("OMP_WAIT", "GOMP_"))}


def knows_hydra(cfg):
    import logging

    from hydra.core.hydra_config import HydraConfig

    logging.getLogger("my.project").info("said through logging")
    return HydraConfig.get().runtime.output_dir


class Callable:
    """A trainer may be any callable."""

    def __call__(self, cfg):
        return cfg.training.batch_size


instance = Callable()


def computes_on_its_device(cfg):
    import torch

    return torch.ones(3, device=cfg.device).sum().item()


def sees_through_torch(cfg):
    import torch

    properties = torch.cuda.get_device_properties(cfg.device)
    return {"uuid": f"GPU-{properties.uuid}", "count": torch.cuda.device_count()}


def fills_two_gib_of_the_gpu(cfg):
    """Real tensors, 100 MiB a sample, in a process that may have 2 GiB of the GPU."""
    import torch

    _, total = torch.cuda.mem_get_info(cfg.device)
    torch.cuda.set_per_process_memory_fraction(2 * 1024**3 / total)
    batch = torch.empty(cfg.training.batch_size, 100 * 1024**2, dtype=torch.uint8, device="cuda")
    return batch.shape[0]


def stops_once_then_completes(cfg, run):
    """Stops with a checkpoint when asked to; an attempt that resumes from it completes."""
    if run.resume_checkpoint is not None:
        return f"went on from {Path(run.resume_checkpoint).name}"
    assert not run.stop_requested  # who has looked once is asked to stop, not interrupted
    is_ready()
    while not run.stop_requested:
        time.sleep(0.01)
    saves(run, "when-preempted", 1)
    raise Interrupted


def splits_within_a_budget(cfg, run):
    """A step in which parts above the GPU's budget run out of memory."""
    import torch

    budgets = json.loads(os.environ["BATCH_BUDGETS"])
    budget = budgets.get(os.environ.get("CUDA_VISIBLE_DEVICES") or "cpu", 10**9)
    sizes = []

    def loss_of(part):
        sizes.append(len(part))
        if len(part) > budget:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (part * torch.ones((), requires_grad=True)).mean()

    run.backward(loss_of, torch.zeros(cfg.training.batch_size, 1))
    return {"repeats": sum(size > budget for size in sizes), "part": sizes[-1]}


def tells_its_memory(cfg, run):
    """Tells of GPU memory, then waits to be told; runs out of memory at its first attempt."""
    figures = {"allocated": 2 * 1024**3, "reserved": 3 * 1024**3, "max_allocated": 5 * 1024**3}
    run.send(MemoryReported("here", **figures))
    waits_for_the_go(f".{run.attempt}")
    if run.attempt == 1:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fills_memory(cfg):
    """Touches 20 MiB of memory for each sample of the batch."""
    return len(bytearray(b"x") * (cfg.training.batch_size * 20 * 1024**2))


class RequeuedJob:
    """As people hand it to submitit: a callable whose ``checkpoint`` submits it again."""

    def __call__(self, run_dir: Path):
        from robust_train import launch

        return launch("trainers.stops_once_then_completes", {}, run_dir=run_dir).result

    def checkpoint(self, run_dir: Path):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)
