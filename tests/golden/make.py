"""Record the golden journals from real runs: python tests/golden/make.py [NAME …]

Each folder has what a run left, and ``expected.json``, the story of it. Record them again when the
schema of the journal changes. When a story is told in other words, ``--tell`` writes the
expectations only; read the difference.
"""

import json
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

from command_world import CommandWorld  # noqa: E402
from golden.told import told  # noqa: E402
from robust_train.report.sources import read_sources  # noqa: E402
from robust_train.report.story import story_of  # noqa: E402
from simulated_nvml import Gpu, Machine, build_libcuda, build_nvml  # noqa: E402
from world import ROOT, World, wait_until  # noqa: E402

KEPT = ("journal.jsonl", "memory.jsonl", "summary.json", "sweep.json", "sweep_job.json")
TRAIN = (
    "trainer._target_=golden_trainers.train",
    "training.batch_size=32",
    "training.lr=0.01",
    "training.num_workers=0",
    "memory.samples=true",
)
ON_CPU = (*TRAIN, "device=cpu", "auto_device=false")


class Bench(World):
    """A scratch folder with a machine of two simulated GPUs, where commands run as users' do."""

    alone = True

    def __init__(self, scratch):
        super().__init__(scratch)
        build_nvml(scratch / "libraries")
        libraries = build_libcuda(scratch / "libraries").parent
        gpus = [Gpu(total_mib=24000, free_mib=20000) for _ in range(2)]
        self.at_step_6 = scratch / "at_step_6"
        self.environ |= {
            **Machine(scratch, libraries, gpus).environ,
            "PYTHONPATH": f"{HERE}:{ROOT / 'src'}",
            "ROBUST_TRAIN_STATE_DIR": str(scratch / "state"),
            "AT_STEP_6": str(self.at_step_6),
        }

    def train(self, meets, *overrides):
        """Run one job to its end; the trainer meets what is named."""
        self.environ["MEETS"] = meets
        self.run(*overrides)

    def end_at_step_6(self, meets, signum):
        """Run one job, and send its launcher a signal at step 6."""
        self.environ["MEETS"] = meets
        self.at_step_6.unlink(missing_ok=True)
        launcher = self.start(*ON_CPU)
        wait_until(self.at_step_6.exists, "step 6")
        launcher.send_signal(signum)
        self.end(launcher)

    def resume(self):
        """Stop a job, and run the same command again."""
        self.end_at_step_6("stopped", signal.SIGTERM)
        time.sleep(1)
        self.train("stopped", *ON_CPU)

    def script(self):
        """Run a script to its end."""
        program = [sys.executable, str(HERE / "golden_script.py"), "--batch-size", "{batch_size}"]
        CommandWorld(self).run("--batch-size", "32", "device=cpu", "--", *program)

    def sweep(self):
        """Run a sweep of two jobs to its end."""
        where = f"hydra.sweep.dir={self.run_dir}"
        self.train(
            "nothing", "-m", *ON_CPU, "hydra/launcher=gpu_queue", where, "training.lr=0.01,0.02"
        )


CASES = {
    "completed": lambda bench: bench.train("nothing", *ON_CPU),
    "oom_in_step": lambda bench: bench.train("oom_in_step", *ON_CPU),
    "oom_ends_attempts": lambda bench: bench.train(
        "oom", *TRAIN, "min_batch_size=16", "max_retries=1"
    ),
    "killed": lambda bench: bench.train("killed", *ON_CPU, "max_retries=1"),
    "bug": lambda bench: bench.train("bug", *ON_CPU),
    "lost": lambda bench: bench.end_at_step_6("lost", signal.SIGKILL),
    "stopped": lambda bench: bench.end_at_step_6("stopped", signal.SIGTERM),
    "resumed": Bench.resume,
    "script": Bench.script,
    "two_ranks": lambda bench: bench.train("nothing", *TRAIN, "num_gpus=2"),
    "sweep": Bench.sweep,
}


def keep(folder, scratch, name):
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


def tell(folder):
    """Write the expectations of the journals in a folder."""
    for journal in sorted(folder.rglob("journal.jsonl")):
        text = json.dumps(told(story_of(read_sources(journal.parent))), indent=1)
        (journal.parent / "expected.json").write_text(text + "\n")


def main(names):
    if names == ["--tell"]:
        tell(HERE)
        return
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place))
        for name in names or CASES:
            bench.run_dir = bench.folder / name
            CASES[name](bench)
            keep(bench.run_dir, bench.folder, name)
            tell(HERE / name)
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
