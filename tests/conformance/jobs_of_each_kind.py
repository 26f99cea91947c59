"""Kinds of jobs, and one of them as a test runs it; their trainers: ``conformance_trainers``."""

import contextlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, replace

import psutil

import warm
from robust_train.folder.checkpoints import SUFFIX
from world import SUPPORT, Ended, wait_until

BOUND_SECONDS = 90
DAY_SECONDS = 86_400
PROPOSED = re.compile(r"robust-train ((?:resume|attach|status|stop|logs|wait|report) [^\s,;:)]+)")

COMMON = ("min_batch_size=1", "retry_pause_seconds=0.1", "training.num_workers=0", "seed=3")
SMALL = (*COMMON, "training.checkpoint_every_steps=2")
DIGITS = (
    *COMMON,
    "model.width=8",
    "model.dropout=0",
    "training.epochs=1",
    "training.checkpoint_every_steps=3",
)
SCRIPT = (
    *COMMON,
    "trainer=command",
    f"trainer.argv=[{sys.executable},{SUPPORT / 'conformance_trainers.py'},"
    "'{batch_size}x{gradient_accumulation_steps}','{run_dir}/checkpoints']",
    "trainer.checkpoint_glob='{run_dir}/checkpoints/*.json'",
    "trainer.resume_argv=['{checkpoint}']",
)
RANKS = ("num_gpus=2", "auto_device=false", "device=cpu")


def trainer(name):
    return f"trainer._target_=conformance_trainers.{name}"


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    name: str
    arguments: tuple[str, ...]  # those of its command
    batch_size: int = 8  # micro-batch of its first attempt
    like: str = ""  # the kind, without GPUs and ranks, that learns the same; by default itself
    needs: str = ""  # the package without which it is skipped
    on_gpus: bool = False  # it runs on simulated GPUs
    splits: bool = True  # it repeats a step in parts where memory runs out, and saves on request
    processes: int = 2  # how many there are from the innermost to the command

    @property
    def words(self):
        return [*self.arguments, f"training.batch_size={self.batch_size}"]

    @property
    def is_like_in_ranks(self):
        return self.name.startswith(f"{self.like} in ")

    @property
    def is_sweep(self):
        return "-m" in self.arguments


def in_ranks(kind, how="ranks", *words):
    """The same job in two ranks, which together learn what one rank learns."""
    return replace(
        kind,
        name=f"{kind.name} in {how}",
        arguments=(*kind.arguments, *RANKS, *words),
        batch_size=kind.batch_size // 2,
        like=kind.name,
    )


FUNCTION = (trainer("function"), *SMALL)
VISION = Kind("vision", (trainer("vision"), *DIGITS), 64)
FRAMEWORKS = [
    Kind(name, (trainer(name), *SMALL), needs=name)
    for name in ("lightning", "transformers", "accelerate")
]
KINDS = [
    Kind("function", FUNCTION, on_gpus=True),
    Kind("ranks", (*FUNCTION, "num_gpus=2"), 4, like="function", on_gpus=True),
    Kind(
        "sweep",
        ("-m", *FUNCTION, "hydra/launcher=gpu_queue"),
        like="function",
        on_gpus=True,
        processes=3,
    ),
    Kind("script", SCRIPT, on_gpus=True, splits=False, processes=3),
    VISION,
    in_ranks(VISION),
    in_ranks(VISION, "shards", "training.sharding=fsdp"),
    *FRAMEWORKS,
    *(in_ranks(kind) for kind in FRAMEWORKS),
]


class Day:
    """One job, what happens to it, and what is true afterwards."""

    def __init__(self, world, kind, *words, machine=None):
        self.world = world
        self.kind = kind
        if machine is not None:
            world.with_environ(machine.environ)
        self.words = [*kind.words, *words]
        self.run_dir = world.run_dir
        if kind.is_sweep:
            self.words.append(f"hydra.sweep.dir={world.folder / 'sweep'}")
            self.run_dir = world.folder / "sweep" / "0"
        self.ready_file = world.folder / "ready"
        self.hold = world.folder / "ready.hold"
        self.weights_file = world.folder / "weights"
        world.environ |= {
            "READY_FILE": str(self.ready_file),
            "WEIGHTS_FILE": str(self.weights_file),
        }
        self.proposed: set[str] = set()
        """Commands that the screen has named."""
        self.pids: list[int] = []
        self.chain: list[int] = []
        """Process ids from the trainer outwards to the command."""

    def newest(self):
        manifests = sorted((self.run_dir / "checkpoints").glob(f"*{SUFFIX}"))
        return manifests[-1] if manifests else None

    def start(self, *, alone=False):
        """Start the command, wait until it has saved a checkpoint, and hold it there.

        With ``alone`` the process is not a fork, so that a later launch can repeat its command.
        """
        self.hold.touch()
        self.world.alone = alone or self.kind.is_sweep
        self.process = self.world.start(*self.words)
        wait_until(self._trains, "the job trains")
        root = psutil.Process(self.process.pid)
        self.pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
        self.chain = [int(self.ready_file.read_text())]
        while self.chain[-1] != self.process.pid:
            parent = psutil.Process(self.chain[-1]).parent()
            self.chain.append(parent.pid)

    def _trains(self):
        assert self.process.poll() is None, self.process.communicate()
        return self.ready_file.exists() and self.newest() is not None

    def end(self, code=None):
        """Let it continue, and wait for the command."""
        self.hold.unlink(missing_ok=True)
        return self.ended(self.process, code)

    def meets(self, what, code=0):
        """Run the command, whose first attempt meets this once it has saved."""
        self.world.environ["MEETS"] = what
        ended = self.ended(self.world.start(*self.words), code)
        del self.world.environ["MEETS"]
        return ended

    def requests(self, verb, *, is_refused=False):
        """Have the held job answer ``robust-train …``; return what that printed."""
        argv = ("-m", "robust_train.cli.main", verb, str(self.run_dir))
        asking = warm.start(argv, self.world.folder, self.world.environ)
        requests = self.run_dir / "requests"
        wait_until(lambda: list(requests.glob("*.taken")), "the request is taken")
        self.hold.unlink()
        return self.ended(asking, int(is_refused)).output

    def completes(self, *words):
        return self.ended(self.world.start(*self.words, *words), 0)

    def ended(self, process, code=None):
        """Wait for a command, which has a bound, and assert its exit code, if one is given."""
        stdout, stderr = process.communicate(timeout=BOUND_SECONDS)
        self.proposed |= set(PROPOSED.findall(stdout + stderr))
        return Ended(process.returncode, stdout, stderr, self.run_dir).with_code(code)

    def a_day_passes(self):
        """Let all that was recorded, and the files with it, be a day older."""
        now = time.time()

        def older(value):
            if isinstance(value, dict):
                return {name: older(inner) for name, inner in value.items()}
            if isinstance(value, list):
                return [older(inner) for inner in value]
            is_moment = isinstance(value, float) and now - 2 * DAY_SECONDS < value <= now
            return value - DAY_SECONDS if is_moment else value

        for path in self.world.folder.rglob("*"):
            if path.is_symlink() or not path.is_file():
                continue
            times = path.stat()
            if path.suffix in (".json", ".jsonl"):
                with contextlib.suppress(ValueError):
                    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else None
                    contents = [path.read_text()] if lines is None else lines
                    path.write_text("\n".join(json.dumps(older(json.loads(c))) for c in contents))
            os.utime(path, (times.st_atime - DAY_SECONDS, times.st_mtime - DAY_SECONDS))

    def journal(self, event):
        return [line for line in self.events() if line["event"] == event]

    def events(self):
        for line in (self.run_dir / "journal.jsonl").open():
            with contextlib.suppress(ValueError):  # torn where the disk was full
                yield json.loads(line)
