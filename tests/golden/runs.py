"""The runs that are recorded here: the commands of each, and what its trainer meets."""

import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil

import warm
from command_world import CommandWorld, all_gone
from simulated_nvml import Gpu, Machine, build_libcuda, build_nvml
from world import ROOT, World, wait_until

HERE = Path(__file__).resolve().parent
TRAIN = (
    "trainer._target_=golden_trainers.train",
    "training.batch_size=32",
    "training.lr=0.01",
    "training.num_workers=0",
    "memory.samples=true",
)
CPU = ("device=cpu", "auto_device=false")
ON_CPU = (*TRAIN, *CPU)


class Bench(World):
    """A folder with a machine of two simulated GPUs.

    ``project`` is the checkout whose commands run, and ``ended`` is what they left, in order.
    """

    def __init__(self, folder, libraries, project=ROOT):
        super().__init__(folder)
        gpus = [Gpu(total_mib=24000, free_mib=20000) for _ in range(2)]
        self.project = project
        self.ended = []
        self.at_step_6 = folder / "at_step_6"
        self.environ |= {
            **Machine(folder, libraries, gpus).environ,
            "PYTHONPATH": f"{HERE}:{project / 'src'}",
            "ROBUST_TRAIN_STATE_DIR": str(folder / "state"),
            "AT_STEP_6": str(self.at_step_6),
            "MEETS": "nothing",
        }

    def command(self, *arguments, script="train_robust.py"):
        """Return the command, whose script is the project's or stands here."""
        path = HERE / script if (HERE / script).exists() else self.project / script
        return [sys.executable, str(path), *arguments, f"hydra.run.dir={self.run_dir}"]

    def end(self, process, code=None):
        """Wait for a command, and keep what it left."""
        self.ended.append(super().end(process, code))
        return self.ended[-1]

    def train(self, meets, *overrides, script="train_robust.py"):
        """Run one job to its end; the trainer meets what is named."""
        self.environ["MEETS"] = meets
        self.end(self.start(*overrides, script=script))

    def end_at_step_6(self, meets, signum):
        """Run one job, look at it at step 6, and send its launcher a signal."""
        self.environ["MEETS"] = meets
        launcher = self.start(*ON_CPU)
        state = self.run_dir / "state.json"
        wait_until(self.at_step_6.exists, "step 6")
        wait_until(lambda: '"end_step": 6' in state.read_text(), "step 6 in state.json")
        self.robust_train("ps", "--json")
        self.robust_train("status", "--json", self.run_dir)
        job = [process.pid for process in psutil.Process(launcher.pid).children(recursive=True)]
        launcher.send_signal(signum)
        self.end(launcher)
        all_gone(job)

    def resume(self):
        """Stop a job, and run the same command again."""
        self.end_at_step_6("stopped", signal.SIGTERM)
        self.train("stopped", *ON_CPU)

    def script(self):
        """Run a script to its end."""
        program = [sys.executable, str(HERE / "golden_script.py"), "--batch-size", "{batch_size}"]
        CommandWorld(self).run("--batch-size", "32", *CPU[:1], "--", *program)

    def guest(self):
        """Run two ranks of torchrun, which starts them again after they have run out of memory."""
        self.environ["MEETS"] = "oom"
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        command = (*torchrun, "--max-restarts=1", HERE / "golden_guest.py", self.run_dir)
        self.end(warm.start(command, self.folder, self.environ, alone=True))

    def sweep(self):
        """Run a sweep of two jobs to its end."""
        where = f"hydra.sweep.dir={self.run_dir}"
        self.train(
            "nothing", "-m", *ON_CPU, "hydra/launcher=gpu_queue", where, "training.lr=0.01,0.02"
        )


@contextmanager
def bench_of(project):
    """Make a bench for one case, where the commands of a checkout begin as users' do."""
    with tempfile.TemporaryDirectory() as name:
        libraries = Path(name) / "libraries"
        build_nvml(libraries)
        build_libcuda(libraries)
        bench = Bench(Path(name), libraries, project)
        bench.alone = True
        yield bench


CASES = {
    "completed": lambda bench: bench.train("nothing", *ON_CPU),
    "oom_in_step": lambda bench: bench.train("oom_in_step", *ON_CPU),
    "oom_ends_attempts": lambda bench: bench.train(
        "oom", *TRAIN, "min_batch_size=16", "max_retries=1"
    ),
    "diverged": lambda bench: bench.train("diverged", *ON_CPU, "max_retries=1"),
    "stall": lambda bench: bench.train("stall", *ON_CPU, "stall_timeout_minutes=0.1"),
    "killed": lambda bench: bench.train("killed", *ON_CPU, "max_retries=1"),
    "bug": lambda bench: bench.train("bug", *ON_CPU),
    "lost": lambda bench: bench.end_at_step_6("lost", signal.SIGKILL),
    "stopped": lambda bench: bench.end_at_step_6("stopped", signal.SIGTERM),
    "resumed": Bench.resume,
    "script": Bench.script,
    "project": lambda bench: bench.train("oom", script="golden_project/main.py"),
    "guest": Bench.guest,
    "two_ranks": lambda bench: bench.train("nothing", *TRAIN, "num_gpus=2"),
    "sweep": Bench.sweep,
}
