"""Trainers as users write them, each with one property that a test needs.

torch is imported by those that use it, so that the others start sooner.
"""

import atexit
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from robust_train.attempt.run import live_of
from robust_train.model.errors import TrainingStopped
from robust_train.model.events import MemoryReported


def saves(run, name, step, text=None):
    """Write a checkpoint, which by default holds its step, and report it."""
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / name
    path.write_text(str(step) if text is None else text)
    run.checkpoint_saved(path, step)


def steps(run, last=sys.maxsize, *, pause=0.01, **reported):
    """Yield the steps from that of the newest checkpoint on, each once it is reported."""
    done = 0 if run.resume_checkpoint is None else int(Path(run.resume_checkpoint).read_text())
    run.started(done)
    for step in range(done + 1, last + 1):
        run.progress(step, **reported)
        yield step
        time.sleep(pause)


def takes_short_steps(cfg, run):
    for step in range(1, 10):
        run.progress(step, total_steps=9, loss=1 / step)


def reports_until_told(cfg, run):
    assert not run.should_stop()
    run.progress(1)
    while not run.should_stop():
        time.sleep(0.01)


def fails_after_short_steps(cfg, run):
    takes_short_steps(cfg, run)
    return 1 / 0


def stops_when_told(run, step, name="when-told"):
    if run.should_stop():
        saves(run, name, step)
        raise TrainingStopped


def works_until_told(run, ready, name="when-told", until=lambda: False):
    """Say in the file ``ready`` who is at work; then wait to be told to stop."""
    assert not run.should_stop()  # who has looked once is asked to stop, not interrupted
    ready.write_text(str(os.getpid()))
    while not until():
        stops_when_told(run, 1, name)
        time.sleep(0.01)


def is_ready(*more_pids):
    """Tell the test who trains."""
    Path(os.environ["READY_FILE"]).write_text(" ".join(map(str, (os.getpid(), *more_pids))))


def waits_for_the_go(suffix=""):
    while not Path(os.environ["GO_FILE"] + suffix).exists():
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
    """Saves a checkpoint at step 5, runs out of memory at the first attempt, then continues."""
    for step in steps(run, 10, total_steps=10):
        if step == 5:
            saves(run, "five", step)
        if step == 7 and run.attempt == 1:
            raise MemoryError
    return live_of(run).reports.steps_before


def dies_of_segfault(cfg):
    ctypes.string_at(0)


def dies_of_sigkill(cfg):
    os.kill(os.getpid(), signal.SIGKILL)


def calls_sys_exit(cfg):
    sys.exit(3)


def calls_os_exit(cfg):
    os._exit(0)


def catches_everything_and_stops_politely(cfg, run):
    for step in steps(run):
        is_ready()
        stops_when_told(run, step)


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
        return f"continued from {Path(run.resume_checkpoint).name}"
    return works_until_told(run, Path(os.environ["READY_FILE"]), "when-preempted")


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
    live_of(run).reports.send(MemoryReported("here", **figures))
    waits_for_the_go(f".{run.attempt}")
    if run.attempt == 1:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fills_memory(cfg):
    return len(bytearray(b"x") * (cfg.training.batch_size * 20 * 1024**2))


class RequeuedJob:
    """As people hand it to submitit: a callable whose ``checkpoint`` submits it again."""

    def __call__(self, run_dir: Path):
        from robust_train import launch

        return launch("trainers.stops_once_then_completes", {}, run_dir=run_dir).result

    def checkpoint(self, run_dir: Path):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, run_dir)


LARGE_BYTES = 10_000_000


def saves_when_stopped(cfg, run):
    for step in steps(run):
        if step == 3:
            is_ready()
        if run.should_stop():
            break
    run.checkpoint_dir.mkdir(exist_ok=True)
    path = run.checkpoint_dir / f"step-{step}"
    with path.open("w") as file:
        for _ in range(20):  # a signal in the middle must not break this off
            file.write("x" * 1000)
            time.sleep(0.02)
    run.checkpoint_saved(path, step)
    raise KeyboardInterrupt


def goes_on_alone(cfg, run):
    """Counts its steps in a file, whoever listens."""
    for step in steps(run, 3000, pause=0):
        run.record("note", {"step": step, "text": "x" * 500})
        if step % 100 == 0:
            Path(os.environ["STEPS_FILE"]).write_text(str(step))
        if step == 1:
            is_ready()
            waits_for_the_go()
    run.record("large", {"text": "y" * LARGE_BYTES})
    return {"steps": step, "large": "z" * LARGE_BYTES}


def prints_a_lot(cfg, run):
    for _ in steps(run, 400, pause=0):
        print("x" * 10_000)
    print("the last line", flush=True)
    is_ready()
    while not run.should_stop():
        time.sleep(0.01)
    raise KeyboardInterrupt


def runs_out_of_memory(cfg):
    raise MemoryError


def completes_but_does_not_end(cfg):
    atexit.register(time.sleep, 1000)
    return "done"


def uploads_at_exit(cfg, run):
    def upload():
        time.sleep(0.2)
        (run.run_dir / "uploaded").touch()

    atexit.register(upload)
    return "done"


def fails_but_does_not_end(cfg):
    atexit.register(time.sleep, 1000)
    raise KeyError("why it failed")


class StopsItsJob:
    """A result that sends SIGTERM while it is turned into a number, after the trainer returned."""

    ndim = 0

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    def item(self) -> float:
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)
        return 0.5


def is_stopped_when_it_has_returned(cfg, run):
    launcher = os.getpid()
    if cfg.isolation == "process":
        launcher = os.getppid()
        assert not run.should_stop()  # the other one never reads it
    return StopsItsJob(launcher, os.getpid())


def returns_when_it_is_stopped(cfg, run):
    assert not run.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.should_stop()
    return "what there is so far"


def returns_its_pid(cfg):
    return os.getpid()


def hides_a_helper(cfg, run):
    """Start a process that nothing but its ancestors shows to be of the job."""
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    pids = f"attempt {os.getpid()}\nhelper {helper.pid}\n"
    Path(os.environ["PIDS_FILE"]).write_text(pids)
    while run.attempt == 1 and not run.should_stop():
        time.sleep(0.05)


def waits_for_the_standby(cfg, run):
    """Train until the standby has imported a library, and fail; the retry looks whether it has."""
    if run.attempt > 1:
        # in the order of their imports; the standby has not imported the trainer's module
        names = list(sys.modules)
        later = names[names.index("trainers") :]
        ours = [name for name in later if name.startswith("robust_train.")]
        return {"was_there": "PIL.Image" in sys.modules, "ours_imported_later": ours}
    import PIL.Image  # noqa: F401
    import psutil

    run.started(0)
    run.progress(1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        launcher = psutil.Process().parent()
        for child in launcher.children():
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            if child.pid != os.getpid() and "/PIL/_imaging" in maps:
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


def _network():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def never_uses_run(cfg):
    """Only torch."""
    import torch

    model, optimizer = _network()
    while not Path(os.environ["GO_FILE"]).exists():
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        is_ready()
        time.sleep(0.02)
    return "ended"


def reports_and_nothing_else(cfg, run):
    for _ in steps(run, pause=0.02, loss=0.5):
        is_ready()
        if Path(os.environ["GO_FILE"]).exists():
            break


def hangs_after_a_step(cfg, run):
    run.started(0)
    run.progress(1, total_steps=10, loss=0.5)
    is_ready()
    waits_for_the_go()
    return "ended"


def does_not_hear_a_stop(cfg, run):
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    return hangs_after_a_step(cfg, run)


def trains_in_parts(cfg, run):
    """Thirty steps in micro-batches; halts after the fifth until it is told to continue."""
    import torch

    model, optimizer = _network()
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for step in range(1, 31):
        data = torch.randn(64, 8, generator=generator)
        optimizer.zero_grad()
        parts = []

        def loss_of(part, parts=parts):
            parts.append(len(part))
            return (model(part) - part.sum(1, keepdim=True)).square().mean()

        run.backward(loss_of, data, model)
        optimizer.step()
        sizes.append(max(parts))
        run.progress(step, total_steps=30)
        if step == 5:
            is_ready()
        while step >= 5 and not Path(os.environ["GO_FILE"]).exists():
            time.sleep(0.02)
            run.progress(step)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"sizes": sizes, "weights": weights.tolist()}
