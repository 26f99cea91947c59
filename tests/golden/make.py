"""Record the golden journals from real runs: python tests/golden/make.py [NAME …]

Each folder has what a run left, and ``expected.json``, the story of it. Record them again when the
schema of the journal changes. When a story is told in other words, ``--tell`` writes the
expectations only; read the difference.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS, ROOT = HERE.parent, HERE.parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from golden.told import told  # noqa: E402
from robust_train.report.sources import read_sources  # noqa: E402
from robust_train.report.story import story_of  # noqa: E402
from simulated_nvml import Gpu, Machine, build_libcuda, build_nvml  # noqa: E402

KEPT = ("journal.jsonl", "memory.jsonl", "summary.json", "sweep.json", "sweep_job.json")
TRAIN = (
    "trainer._target_=golden_trainers.train",
    "training.batch_size=32",
    "training.lr=0.01",
    "training.num_workers=0",
    "memory.sample_interval_ms=100",
)
ON_CPU = (*TRAIN, "device=cpu", "auto_device=false")


class Bench:
    """A scratch folder with a machine of two simulated GPUs, where commands run."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        libraries = scratch / "libraries"
        libraries.mkdir()
        build_nvml(libraries)
        gpus = [Gpu(total_mib=24000, free_mib=20000), Gpu(total_mib=24000, free_mib=20000)]
        self._machine = Machine(scratch, build_libcuda(libraries).parent, gpus)
        hidden = ("CUDA_", "HYDRA_", "ROBUST_TRAIN_")
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        self.environ |= {
            "PYTHONPATH": f"{HERE}:{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "ROBUST_TRAIN_QUEUE_DIR": str(scratch / "queue"),
            "ROBUST_TRAIN_STATE_DIR": str(scratch / "state"),
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "AT_STEP_6": str(scratch / "at_step_6"),
        }
        self.environ |= self._machine.environ

    def start(self, meets: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the launcher; the trainer meets what is named."""
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.scratch,
            env={**self.environ, "MEETS": meets},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def train(self, folder: Path, meets: str, *overrides: str) -> None:
        """Run one job to its end."""
        words = [str(ROOT / "train_robust.py"), *overrides, f"hydra.run.dir={folder}"]
        self.start(meets, words).wait(timeout=300)

    def end(self, folder: Path, meets: str, signum: int, *overrides: str) -> None:
        """Run one job, and send its launcher a signal at step 6."""
        at_step_6 = Path(self.environ["AT_STEP_6"])
        at_step_6.unlink(missing_ok=True)
        words = [str(ROOT / "train_robust.py"), *overrides, f"hydra.run.dir={folder}"]
        launcher = self.start(meets, words)
        while not at_step_6.exists():
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(signum)
        launcher.wait(timeout=300)

    def script(self, folder: Path) -> None:
        """Run a script to its end."""
        program = [sys.executable, str(HERE / "golden_script.py"), "--batch-size", "{batch_size}"]
        words = ["--run-dir", str(folder), "--batch-size", "32", "device=cpu", "--", *program]
        self.start("", ["-m", "robust_train.cli.main", "run", *words]).wait(timeout=300)

    def sweep(self, folder: Path) -> None:
        """Run a sweep of two jobs to its end."""
        words = ["-m", *ON_CPU, "hydra/launcher=gpu_queue", f"hydra.sweep.dir={folder}"]
        words += ["training.lr=0.01,0.02"]
        self.start("nothing", [str(ROOT / "train_robust.py"), *words]).wait(timeout=300)


def resume(bench: Bench, folder: Path) -> None:
    """Stop a job, and run the same command again."""
    bench.end(folder, "stopped", signal.SIGTERM, *ON_CPU)
    time.sleep(1)
    bench.train(folder, "stopped", *ON_CPU)


CASES: dict[str, Callable[[Bench, Path], None]] = {
    "completed": lambda bench, folder: bench.train(folder, "nothing", *ON_CPU),
    "oom_in_step": lambda bench, folder: bench.train(folder, "oom_in_step", *ON_CPU),
    "oom_ends_attempts": lambda bench, folder: bench.train(
        folder, "oom", *TRAIN, "min_batch_size=16", "max_retries=1"
    ),
    "killed": lambda bench, folder: bench.train(folder, "killed", *ON_CPU, "max_retries=1"),
    "bug": lambda bench, folder: bench.train(folder, "bug", *ON_CPU),
    "lost": lambda bench, folder: bench.end(folder, "lost", signal.SIGKILL, *ON_CPU),
    "stopped": lambda bench, folder: bench.end(folder, "stopped", signal.SIGTERM, *ON_CPU),
    "resumed": resume,
    "script": Bench.script,
    "two_ranks": lambda bench, folder: bench.train(folder, "nothing", *TRAIN, "num_gpus=2"),
    "sweep": Bench.sweep,
}


def keep(folder: Path, scratch: Path, name: str) -> None:
    """Copy what a report is made from, without the names of this machine."""
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    names = {
        str(scratch): "/runs",
        sys.executable: "python",
        sys.prefix: "/python",
        str(ROOT): "/project",
        platform.node(): "host",
    }
    for path in sorted(folder.rglob("*")):
        if path.name in KEPT:
            text = path.read_text()
            for own, neutral in names.items():
                text = text.replace(own, neutral)
            text = re.sub(r'"error": "[\w+/=]+"', '"error": null', text)
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def tell(folder: Path) -> None:
    """Write the expectations of the journals in a folder."""
    for journal in sorted(folder.rglob("journal.jsonl")):
        text = json.dumps(told(story_of(read_sources(journal.parent))), indent=1)
        (journal.parent / "expected.json").write_text(text + "\n")


def main(names: Sequence[str]) -> None:
    if names == ["--tell"]:
        tell(HERE)
        return
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place))
        for name in names or CASES:
            folder = bench.scratch / name
            CASES[name](bench, folder)
            keep(folder, bench.scratch, name)
            tell(HERE / name)
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
