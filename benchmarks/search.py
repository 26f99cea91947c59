"""A search on four simulated GPUs whose trials' lengths differ fourfold, and one that is killed.

``hydra/sweeper=robust_optuna`` against perfect packing, as if no launcher took time and nothing
waited. Beside it Hydra's own sweeper with joblib, which starts four trials and waits for all of
them, in an environment of its own (``--hydra-python``; ``pip install hydra-core
hydra-optuna-sweeper hydra-joblib-launcher``). Both draw lengths at random; each is held against
those that it drew. Needs a C compiler, no GPU.

``--pruned`` instead: a search of the built-in trainer on the digits, with the same sampler and seed
once to the end of all trials and once pruned.

``--kills 10`` instead: one trial at a time, a seeded sampler, the launcher killed ten times at
random and the command repeated; against the same search undisturbed.

Run: python benchmarks/search.py [--job-seconds 8] [--hydra-python PATH] [--kills N] [--pruned]
Goal: at most 1.10 × perfect packing; as many trials as asked, none twice, the same values; the same
best pruned, in half the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep import HERE, NEED_MB, ROOT, Gpu, Machine, build_nvml, environment

GPUS = 4

HYDRAS_OWN = """
import time, hydra
from hydra.core.config_store import ConfigStore
ConfigStore.instance().store("config", {"seconds": 1.0})
@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg):
    time.sleep(cfg.seconds)
    with open("lengths", "a") as file:
        file.write(f"{cfg.seconds}\\n")
    return cfg.seconds
main()
"""


def perfect_packing(lengths: list[float]) -> float:
    """Seconds below which no assignment to the GPUs ends."""
    return max(sum(lengths) / GPUS, max(lengths))


def search(folder: Path, *options: str) -> list[str]:
    """The command of a search in a folder."""
    return [
        sys.executable,
        str(ROOT / "train_robust.py"),
        "-m",
        "hydra/sweeper=robust_optuna",
        "hydra.sweeper.sampler.seed=1",
        f"hydra.sweep.dir={folder}/sweep",
        *options,
    ]


def jobs_of(folder: Path) -> list[dict[str, object]]:
    """The table of a search."""
    return json.loads((folder / "sweep" / "sweep.json").read_text())["jobs"]


def ours(machine: Machine, folder: Path, unit: float, trials: int) -> None:
    """Run the search on the simulated GPUs."""
    command = search(
        folder,
        "trainer._target_=sweep_trainer.train",
        f"hydra.sweeper.n_trials={trials}",
        "hydra/sweeper/sampler=robust_random",
        f"+seconds=interval({unit},{4 * unit})",
        f"min_gpu_memory_mb={NEED_MB}",
        "allow_cpu_fallback=false",
    )
    started = time.perf_counter()
    env = environment(machine, folder)
    subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    report("robust_optuna", seconds, [float(job["result"]) for job in jobs_of(folder)])


def hydras_own(python: str, folder: Path, unit: float, trials: int) -> None:
    """Run the published sweeper, whose jobs only sleep."""
    script = folder / "sleeps.py"
    script.write_text(HYDRAS_OWN)
    command = [
        python,
        str(script),
        "-m",
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=robust_random",
        "hydra.sweeper.sampler.seed=1",
        "hydra/launcher=joblib",
        f"hydra.launcher.n_jobs={GPUS}",
        f"hydra.sweeper.n_jobs={GPUS}",
        f"hydra.sweeper.n_trials={trials}",
        f"seconds=interval({unit},{4 * unit})",
    ]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    started = time.perf_counter()
    subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    lengths = (folder / "lengths").read_text().split()
    report("hydra-optuna-sweeper", seconds, [float(length) for length in lengths])


def report(name: str, seconds: float, lengths: list[float]) -> None:
    """Print how well the GPUs were filled."""
    best = perfect_packing(lengths)
    print(
        f"{name}: {len(lengths)} trials, {seconds:.1f} s, {seconds / best:.3f} × perfect packing "
        f"({best:.1f} s)",
        flush=True,
    )


def pruned(folder: Path, trials: int) -> None:
    """Search the digits to the end of all trials, and pruned; compare the best and the steps."""
    for name in ("", "successive_halving"):
        here = folder / (name or "to the end")
        here.mkdir()
        command = search(
            here,
            *([f"hydra/sweeper/pruner={name}"] if name else []),
            "hydra/sweeper/sampler=robust_random",
            f"hydra.sweeper.n_trials={trials}",
            "hydra.sweeper.n_jobs=1",
            "training.lr=tag(log,interval(1e-5,1e-1))",
            "training.batch_size=choice(16,64,256)",
            "training.epochs=9",
            "device=cpu",
        )
        subprocess.run(command, cwd=here, check=True, capture_output=True)
        jobs = jobs_of(here)
        steps = 0
        for job in jobs:
            summary = json.loads((Path(str(job["folder"])) / "summary.json").read_text())
            steps += summary["attempts"][-1]["end_step"]
        best = max(float(job["result"] or 0) for job in jobs)
        over = sum(job["status"] == "pruned" for job in jobs)
        print(
            f"{name or 'to the end'}: {len(jobs)} trials, {over} of them pruned, {steps} steps, "
            f"best {best:.4f}",
            flush=True,
        )


def killed(folder: Path, kills: int, trials: int) -> None:
    """Search one trial at a time, undisturbed and killed; compare what came out."""
    found = []
    for times in (0, kills):
        here = folder / f"killed-{times}"
        here.mkdir()
        command = search(
            here,
            "trainer._target_=sweep_trainer.sleeps",
            "device=cpu",
            "max_launches=0",  # a kill before the first checkpoint is no fault of the trial
            f"hydra.sweeper.n_trials={trials}",
            "hydra.sweeper.n_jobs=1",
            "hydra.sweeper.sampler.n_startup_trials=3",
            "training.lr=interval(0.5,2.0)",
        )
        environ = os.environ | {
            "PYTHONPATH": f"{HERE}:{ROOT / 'src'}",
            "SWEEP_BENCHMARK_LOG": str(here / "ran"),
        }
        for _ in range(times):
            process = subprocess.Popen(
                command, cwd=here, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(random.uniform(2, 6))
            process.kill()
            process.wait()
        subprocess.run(command, cwd=here, env=environ, check=True, capture_output=True)
        completed = (here / "ran").read_text().split()
        twice = len(completed) - len(set(completed))
        jobs = [(job["overrides"][-1], job["result"]) for job in jobs_of(here)]
        print(
            f"killed {times} times: {len(jobs)} trials, {twice} completed twice, best "
            f"{max(result for _, result in jobs):.6f}",
            flush=True,
        )
        found.append(jobs)
    print("the same trials" if found[0] == found[1] else f"DIFFERENT: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job-seconds", type=float, default=8, help="the shortest")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--hydra-python", help="of an environment with Hydra's sweeper")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--pruned", action="store_true")
    arguments = parser.parse_args()
    unit, trials = arguments.job_seconds, arguments.trials
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.pruned:
            pruned(folder, trials)
            return
        if arguments.kills:
            killed(folder, arguments.kills, trials)
            return
        libraries = build_nvml(folder / "libraries").parent
        state = folder / "state"
        state.mkdir()
        machine = Machine(state, libraries, [Gpu() for _ in range(GPUS)])
        print(f"{trials} trials of {unit:g} to {4 * unit:g} s on {GPUS} GPUs")
        ours(machine, folder, unit, trials)
        if arguments.hydra_python:
            (folder / "hydra").mkdir()
            hydras_own(arguments.hydra_python, folder / "hydra", unit, trials)


if __name__ == "__main__":
    main()
