"""A user's worst day: whatever happens to a job, it ends or goes on, leaves nothing behind, and the
same command goes on to the same weights. Every test starts the real command.

The default suite runs a diagonal of the table, ``just test-all`` all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm
import worst_day_trainers
from robust_train.folder.checkpoints import SUFFIX
from simulated_nvml import Gpu, Machine
from two_gpu_machine import A, B
from world import SUPPORT, Ended, World, is_running, wait_until

BOUND_SECONDS = 90
STOPPED_SECONDS = 1.0

TARGET = "trainer._target_=worst_day_trainers."
SCRIPT = SUPPORT / "worst_day_trainers.py"
BUILT_IN = (
    "model.width=8",
    "training.epochs=2",
    "training.num_workers=1",
    "training.checkpoint_every_steps=10",
    "training.lr=1e-4",
)


@dataclass(frozen=True)
class Kind:
    """A kind of trainer: the command's arguments, and whether it runs on (simulated) GPUs."""

    name: str
    arguments: tuple[str, ...]
    on_gpus: bool = True
    is_sweep: bool = False


KINDS = [
    Kind("function", (f"{TARGET}learns",)),
    Kind("built-in", (f"{TARGET}built_in", *BUILT_IN), on_gpus=False),
    Kind(
        "script",
        (
            "trainer=command",
            f"trainer.argv=[{sys.executable},{SCRIPT},'{{run_dir}}/checkpoints']",
            "trainer.checkpoint_glob='{run_dir}/checkpoints/*.json'",
            "trainer.resume_argv=['{checkpoint}']",
        ),
    ),
    Kind("ranks", (f"{TARGET}learns_in_ranks", "num_gpus=2")),
    Kind(
        "sweep",
        ("-m", f"{TARGET}learns", "training.seed=1", "hydra/launcher=gpu_queue"),
        is_sweep=True,
    ),
]


class Day:
    """One job, what happens to it, and what is true afterwards."""

    def __init__(self, world: World, kind: Kind, machine: Machine | None) -> None:
        self.world = world
        self.kind = kind
        if machine is not None:
            world.with_environ(machine.environ)
        self.arguments = list(kind.arguments)
        self.run_dir = world.run_dir
        if kind.is_sweep:
            self.arguments.append(f"hydra.sweep.dir={world.folder / 'sweep'}")
            self.run_dir = world.folder / "sweep" / "0"
        self.ready_file = world.folder / "ready"
        self.hold = world.folder / "ready.hold"
        self.weights_file = world.folder / "weights"
        world.environ |= {
            "READY_FILE": str(self.ready_file),
            "WEIGHTS_FILE": str(self.weights_file),
        }
        self.chain: list[int] = []

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def newest(self) -> Path | None:
        """The newest checkpoint that was reported whole."""
        manifests = sorted(self.checkpoints.glob(f"*{SUFFIX}"))
        return manifests[-1] if manifests else None

    def start(self) -> None:
        """Start the command and wait until it trains and has saved; there it is held."""
        self.hold.touch()
        self.world.alone = self.kind.is_sweep
        self.process = self.world.start(*self.arguments)
        wait_until(self._trains, f"the job trains: {self._ended_early}")
        root = psutil.Process(self.process.pid)
        self.pids = [root.pid, *(one.pid for one in root.children(recursive=True))]
        # from the trainer outwards to the command
        self.chain = [int(self.ready_file.read_text())]
        while self.chain[-1] != self.process.pid:
            parent = psutil.Process(self.chain[-1]).parent()
            assert parent is not None
            self.chain.append(parent.pid)

    def _trains(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        is_ready = self.ready_file.exists() and self.ready_file.read_text()
        return bool(is_ready) and self.newest() is not None

    @property
    def _ended_early(self) -> str:
        return str(sorted(path.name for path in self.run_dir.glob("**/*")))

    def end(self) -> Ended:
        """Let it go on, and wait for the command, which has a bound."""
        self.hold.unlink(missing_ok=True)
        stdout, stderr = self.process.communicate(timeout=BOUND_SECONDS)
        return Ended(self.process.returncode, stdout, stderr, self.run_dir)

    def leaves_nothing(self) -> None:
        """Assert that no process, lock or reservation is left."""
        for pid in self.pids:
            wait_until(lambda pid=pid: not is_running(pid), f"process {pid} ends")
        wait_until(lambda: not list(self._of_this_job()), "all that it started ends")
        queue = warm.robust_train("queue", "--json", environ=self.world.environ)
        assert "GPU-" not in queue.stdout.replace('"gpus"', ""), queue.stdout

    def _of_this_job(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # an environment cannot be read off a fork of a warm interpreter
                is_here = process.cwd() == str(self.world.folder)
                if is_here or process.environ().get("READY_FILE") == str(self.ready_file):
                    yield process

    def goes_on(self) -> None:
        """Assert that the same command completes the job from its newest whole checkpoint."""
        newest = self.newest()
        self.ready_file.unlink(missing_ok=True)
        ended = self.world.run(*self.arguments)
        assert ended.returncode == 0, ended.output
        last = [event for event in self._journal() if event["event"] == "attempt_started"][-1]
        assert newest is not None
        assert last["resume_checkpoint"] == str(newest).removesuffix(SUFFIX)

    def _journal(self) -> Iterator[dict[str, Any]]:
        for line in (self.run_dir / "journal.jsonl").open():
            with contextlib.suppress(ValueError):  # torn where the disk was full
                yield json.loads(line)

    def is_right(self, undisturbed: Callable[[], str]) -> None:
        """Assert that the weights are those of a job that nothing happened to."""
        if self.kind.name == "built-in":
            assert digest(self.run_dir) == undisturbed()
        else:
            assert self.weights_file.read_text() == worst_day_trainers.final_weights()


def digest(run_dir: Path) -> str:
    """Return a digest of the built-in trainer's weights."""
    import torch

    model = torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)["model"]
    content = b"".join(model[name].numpy().tobytes() for name in sorted(model))
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """The digest of the built-in trainer's weights after a day on which nothing happened."""
    known: list[str] = []

    def run() -> str:
        if not known:
            world = World(tmp_path_factory.mktemp("undisturbed"))
            ended = world.run(*BUILT_IN, "isolation=none")
            assert ended.returncode == 0, ended.output
            known.append(digest(world.run_dir))
        return known[0]

    return run


def sigterm_to_all(day: Day) -> None:
    for pid in reversed(day.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert day.end().returncode == 143


def sigkill_to_all(day: Day) -> None:
    for pid in day.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    day.end()


def sigkill(depth: int) -> Callable[[Day], None]:
    def event(day: Day) -> None:
        if depth >= len(day.chain):
            pytest.skip("this kind of job has fewer processes")
        os.kill(day.chain[depth], signal.SIGKILL)
        day.end()

    return event


def stop_and_continue(depth: int) -> Callable[[Day], None]:
    def event(day: Day) -> None:
        if depth >= len(day.chain):
            pytest.skip("this kind of job has fewer processes")
        process = psutil.Process(day.chain[depth])
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(STOPPED_SECONDS)
        process.resume()
        ended = day.end()
        assert ended.returncode == 0, ended.output

    return event


def full_disk(day: Day) -> None:
    """The run folder is on a disk of its own (see :func:`small_disk`), and now it is full."""
    filler = day.run_dir / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
    ended = day.end()
    filler.unlink()
    if ended.returncode == 0:  # what it had to write was small enough for the last blocks
        return
    # a sweep's job has its own log, on the same full disk
    assert day.kind.is_sweep or "No space left" in ended.output


def unreadable_folder(day: Day) -> None:
    """Killed; then what its checkpoints are cannot be read for a while."""
    sigkill_to_all(day)
    manifests = sorted(day.checkpoints.glob(f"*{SUFFIX}"))
    away = [path.rename(path.with_name(f"{path.name}.away")) for path in manifests]
    for path in manifests:
        path.mkdir()
    again = day.world.start(*day.arguments)
    log = day.run_dir / "train_robust.log"
    wait_until(lambda: "trying again" in log.read_text(), "the launcher waits for them")
    for path, aside in zip(manifests, away, strict=True):
        path.rmdir()
        aside.rename(path)
    stdout, stderr = again.communicate(timeout=BOUND_SECONDS)
    assert again.returncode == 0, stdout + stderr


def blocked_stdout(day: Day) -> None:
    """Nobody reads what it prints, which is more than a pipe holds."""
    day.hold.unlink()
    assert day.process.wait(BOUND_SECONDS) == 0
    day.end()


def second_launcher(day: Day) -> None:
    second = day.world.run(*day.arguments)
    assert second.returncode == 2, second.output
    ended = day.end()
    assert ended.returncode == 0, ended.output


EVENTS: dict[str, Callable[[Day], None]] = {
    "SIGTERM to all": sigterm_to_all,
    "SIGKILL to all": sigkill_to_all,
    **{f"SIGKILL of process {depth}": sigkill(depth) for depth in range(4)},
    **{f"SIGSTOP of process {depth}": stop_and_continue(depth) for depth in range(4)},
    "full disk": full_disk,
    "unreadable folder": unreadable_folder,
    "blocked stdout": blocked_stdout,
    "second launcher": second_launcher,
}
"""Process 0 is the innermost: the script, else the trainer's own process."""

DIAGONAL = {
    ("function", "SIGKILL of process 1"),
    ("built-in", "SIGTERM to all"),
    ("script", "SIGKILL of process 2"),
    ("script", "SIGSTOP of process 3"),
    ("ranks", "SIGTERM to all"),
}
"""SIGTERM to a script and to a sweep: test_stopping.py, test_stopping_a_sweep.py."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        pytest.param(
            kind,
            event,
            id=f"{kind.name}-{event}",
            marks=[] if (kind.name, event) in DIAGONAL else [pytest.mark.slow],
        )
        for kind in KINDS
        for event in EVENTS
    ],
)
def test_a_job_ends_or_goes_on_leaves_nothing_and_is_completed_by_the_same_command(
    world: World,
    kind: Kind,
    event: str,
    cuda_machine_with: Callable[..., Machine],
    undisturbed: Callable[[], str],
):
    gpus = [Gpu(uuid=uuid, total_mib=24000, free_mib=20000) for uuid in (A, B)]
    day = Day(world, kind, cuda_machine_with(*gpus) if kind.on_gpus else None)
    disk = small_disk(day.run_dir) if event == "full disk" else contextlib.nullcontext()
    with disk:
        day.start()
        EVENTS[event](day)
        day.leaves_nothing()
        summary = day.run_dir / "summary.json"
        is_completed = summary.exists() and json.loads(summary.read_text())["status"] == "completed"
        if not is_completed:
            day.goes_on()
        day.is_right(undisturbed)
