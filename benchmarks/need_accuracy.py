"""What a measured job reserves, against what its processes really hold: twenty-one programs.

Each program runs under the launcher with ``min_gpu_memory_mb=auto`` on a simulated GPU of 40 GB. A
driver mirrors what the job's processes have allocated (resident, without pages of files) into NVML
as their GPU memory, some five times a second, so the dynamics are the program's own. It keeps the
peak that NVML has shown and reads the job's record in the queue. Programs of
``tests/other_programs`` learn in no time, so each of their twelve steps is given some seconds. The
same program without measuring shows what measuring costs the launcher. Needs a C compiler and the
extras of the tests, no GPU.

Run: python benchmarks/need_accuracy.py [--only NAME …] [--together 6] [--step-seconds 8]
       [--resident]
Goals: once measured, what is reserved is never below the peak so far; at the end, and for the next
run of the same job, it is 1.0 to 1.15 of the true peak. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "other_programs")]
sys.path.append(str(ROOT))

MIB = 1024**2
DECLARED_BYTES = 4000 * MIB  # the default of the key, until the job is measured
LEAST = 1.0
MOST = 1.15
LOOK_SECONDS = 0.15
MEASURED = "min_gpu_memory_mb=auto allow_cpu_fallback=false"
DECLARED = "allow_cpu_fallback=false"
FUNCTIONS = (
    "training.num_workers=0 training.batch_size=64 training.mixed_precision=false "
    "training.checkpoint_every_steps=20"
)
SLOWER = """
_samples = samples


def samples(step, count=16):
    time.sleep({seconds})
    return _samples(step, count)
"""


@dataclass
class Seen:
    """What the driver has seen of one job."""

    peak: int = 0  # bytes that NVML has shown
    reserved: int = 0  # bytes of its record, at the last look
    lowest: float | None = None  # of reserved ÷ peak so far, since it is measured
    began: tuple[float, float] | None = None  # the clock and the launcher's CPU seconds then
    ended: tuple[float, float] = (0.0, 0.0)

    @property
    def launcher_share(self) -> float:
        """The launcher's CPU time ÷ wall time while the job was on its GPU."""
        if self.began is None or self.ended[0] <= self.began[0]:
            return 0.0
        return (self.ended[1] - self.began[1]) / (self.ended[0] - self.began[0])


class Driver:
    """Shows what each job's processes hold on its GPU, and watches what it reserves."""

    def __init__(self, machine: Any, programs: set[str], *, counts_files: bool) -> None:
        from robust_train.queue.registry import Registry

        self.seen: dict[str, Seen] = {}
        self._machine = machine
        self._programs = programs
        self._counts_files = counts_files
        self._registry = Registry(machine.folder / "queue")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        """Compare each job's record with what it has been shown, then show what it holds now."""
        from robust_train.host.linux import marked_processes

        marked = marked_processes()
        held: dict[str, list[tuple[int, int]]] = {}
        for job in self._registry.jobs():
            if not job.gpus:
                continue
            seen = self.seen.setdefault(job.name, Seen())
            self._compare(seen, job)
            is_program = job.name in self._programs
            rows = processes_that_train(
                job, marked, is_program=is_program, counts_files=self._counts_files
            )
            if rows:
                seen.peak = max(seen.peak, sum(mib for _, mib in rows) * MIB)
            held[job.gpus[0]] = rows
        for number, gpu in enumerate(self._machine.gpus):
            gpu.compute = held.get(self._machine.uuid(number), [])
            gpu.free_mib = gpu.total_mib - sum(mib for _, mib in gpu.compute)
        self._machine.update(0)

    def _compare(self, seen: Seen, job: Any) -> None:
        """Note what a job reserves. What it holds was shown at the look before."""
        cpu = cpu_seconds(job.pid)
        if cpu is not None:
            seen.ended = (time.monotonic(), cpu)
            seen.began = seen.began or seen.ended
        seen.reserved = job.reserved_bytes
        if seen.peak and job.reserved_bytes != DECLARED_BYTES:
            share = job.reserved_bytes / seen.peak
            seen.lowest = share if seen.lowest is None else min(seen.lowest, share)


def processes_that_train(
    job: Any, marked: Mapping[int, list[int]], *, is_program: bool, counts_files: bool
) -> list[tuple[int, int]]:
    """Return the processes of a job that train, with the MiB that each holds.

    The launcher's helpers have the job's mark and hold nothing on a GPU, and neither does the
    interpreter that starts a program, so they are left out. Pages of files are left out unless
    they are to count: an interpreter that ends reads those of torch's libraries again, which a GPU
    would not show, and ranks that end together grow by a sixth within half a second.
    """
    import psutil

    from robust_train.files import read_object
    from robust_train.host.linux import processes_of

    state = read_object(Path(job.run_dir) / "state.json")
    attempt = (state.get("attempt") or {}).get("pid")
    rows = []
    for process in processes_of(job.id, job.owner, lambda: marked):
        with contextlib.suppress(psutil.Error):
            trains = process.pid == attempt and not is_program
            if trains or attempt in (parent.pid for parent in process.parents()):
                memory = process.memory_info()
                held = memory.rss if counts_files else memory.rss - memory.shared
                rows.append((process.pid, -(-held // MIB)))
    return rows


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process; None if it has ended."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def on_the_host(cfg: Any, run: Any) -> Any:
    """Train one of the examples on the CPU, as a job that has a GPU."""
    import os

    cfg.device = "cpu"
    return importlib.import_module(os.environ["EXAMPLE"]).train(cfg, run)


@dataclass(frozen=True)
class Job:
    """A program in a folder of its own: what starts it there."""

    name: str
    start: Callable[[Any], subprocess.Popen[str]]
    is_program: bool = True
    declares: bool = False  # what it needs, so that nothing is measured

    @property
    def folder(self) -> str:
        """The name of its folder, and of the job in the queue."""
        return re.sub(r"\W+", "-", self.name)


def other_program(name: str, step_seconds: float, options: str = MEASURED) -> Job:
    """Return a program of ``tests/other_programs`` as a job."""
    from test_other_programs import Case

    from command_world import CommandWorld

    def start(world: Any) -> subprocess.Popen[str]:
        case = Case(CommandWorld(world), name)
        with (world.folder / "learning.py").open("a") as file:
            file.write(SLOWER.format(seconds=step_seconds))
        words = f"{options} job_name={shlex.quote(world.folder.name)} {case.program.options}"
        case.program = replace(case.program, options=words)
        return case.start("")

    if options == DECLARED:
        return Job(f"{name}, declared", start, declares=True)
    return Job(name, start)


def script(name: str, words: str) -> Job:
    """Return an example that knows nothing of robust-train as a job."""

    def start(world: Any) -> subprocess.Popen[str]:
        from command_world import CommandWorld

        command = [sys.executable, str(ROOT / "examples" / name / "train.py"), *words.split()]
        options = [*MEASURED.split(), f"job_name={world.folder.name}"]
        return CommandWorld(world).start(*options, "--", *command)

    return Job(name, start)


def function(name: str, overrides: str) -> Job:
    """Return an example that is a function as a job."""

    def start(world: Any) -> subprocess.Popen[str]:
        world.environ["EXAMPLE"] = f"examples.{name}.train"
        world.environ["PYTHONPATH"] += f":{ROOT}:{ROOT / 'benchmarks'}"
        words = f"{MEASURED} {FUNCTIONS} {overrides} job_name={world.folder.name}"
        return world.start("trainer._target_=need_accuracy.on_the_host", *words.split())

    return Job(name, start, is_program=False)


def project(name: str, module: str, overrides: str) -> Job:
    """Return an example with a Hydra configuration of its own as a job."""

    def start(world: Any) -> subprocess.Popen[str]:
        folder = ROOT / "examples" / name
        world.environ["EXAMPLE"] = module
        world.environ["PYTHONPATH"] += f":{folder}:{ROOT / 'benchmarks'}"
        words = f"{MEASURED} {overrides} job_name={world.folder.name} data.file={folder}/iris.csv"
        target = "trainer._target_=need_accuracy.on_the_host"
        return world.start(target, *words.split(), script=f"examples/{name}/main.py")

    return Job(name, start, is_program=False)


def all_jobs(step_seconds: float) -> list[Job]:
    """Return the programs, those that mostly sleep among those that compute."""
    from test_other_programs import PLACES

    computing = [
        script("nanogpt_like", "--max_iters=1200"),
        script("yolo_like", "epochs=600"),
        function("accelerate_digits", "training.epochs=4"),
        function("fsdp2_digits", "training.epochs=4"),
        function("lightning_digits", "training.epochs=4"),
        function("ray_digits", "training.epochs=4"),
        function("transformers_sonnets", "training.epochs=2"),
        project("own_project", "iris", "training.epochs=600"),
    ]
    sleeping = [other_program(name, step_seconds) for name in PLACES]
    jobs = [other_program("overwrites", step_seconds, DECLARED)]
    for pair in itertools.zip_longest(sleeping, computing):
        jobs += [job for job in pair if job is not None]
    return jobs


@dataclass(frozen=True)
class Row:
    """What is printed of one job."""

    job: Job
    code: int
    seen: Seen
    next_bytes: int | None  # what the next run of the same job reserves

    @property
    def last_share(self) -> float | None:
        """What is reserved at the end ÷ the true peak; None if it was not measured by then."""
        return None if self.seen.lowest is None else self.seen.reserved / self.seen.peak

    @property
    def next_share(self) -> float | None:
        """What the next run reserves ÷ the true peak; None if nothing was learned."""
        if self.next_bytes is None or not self.seen.peak:
            return None
        return self.next_bytes / self.seen.peak

    @property
    def is_good(self) -> bool:
        """Whether the job ended well, and all that is known of it is within the goals."""
        shares = (self.last_share, self.next_share)
        is_close = all(share is None or LEAST <= share <= MOST for share in shares)
        is_above = self.seen.lowest is None or self.seen.lowest >= LEAST
        is_known = self.job.declares or self.next_share is not None
        return self.code == 0 and is_known and is_close and is_above

    def __str__(self) -> str:
        """Return its line of the table."""
        figures = (self.last_share, self.seen.lowest, self.next_share)
        shown = "".join(f"{'-' if figure is None else f'{figure:.2f}':>9}" for figure in figures)
        shown += f"{100 * self.seen.launcher_share:>8.1f} %"
        remark = ""
        if self.job.declares:
            remark = "  not measured"
        elif self.seen.lowest is None:
            remark = "  too short to be measured while it runs"
        if self.code:
            remark += f"  exit code {self.code}"
        peak = self.seen.peak // MIB
        reserved = self.seen.reserved // MIB
        return f"{self.job.name:22}{peak:>8}{reserved:>9}{shown}{remark}"


def run_job(job: Job, machine: Any, driver: Driver, folder: Path) -> Row:
    """Run a program to its end."""
    from robust_train.features.measured_memory.model import add_margin
    from robust_train.features.measured_memory.store import read_needs
    from world import World

    place = folder / job.folder
    place.mkdir()
    world = World(place).with_environ(machine.environ)
    del world.environ["SIMULATED_NVML_CALLS"]  # Writing a log would be most of the time.
    world.alone = True
    process = job.start(world)
    output = "".join(process.communicate())
    needs = read_needs(place / "cache" / "robust-train" / "needs.json")
    peaks = [peak for need in needs.values() for peak in need.on().values()]
    known = add_margin(max(peaks)) if peaks else None
    if process.returncode:
        print(output, file=sys.stderr)
    return Row(job, process.returncode, driver.seen.get(place.name, Seen()), known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="programs by name")
    parser.add_argument("--together", type=int, default=6, help="programs at once")
    parser.add_argument("--step-seconds", type=float, default=8.0)
    parser.add_argument("--resident", action="store_true", help="count pages of files too")
    chosen = parser.parse_args()

    from simulated_nvml import Gpu, Machine, build_libcuda, build_nvml

    jobs = [job for job in all_jobs(chosen.step_seconds) if job.name in (chosen.only or [job.name])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_nvml(folder / "libraries")
        libraries = build_libcuda(folder / "libraries").parent
        gpus = [Gpu() for _ in range(chosen.together)]
        machine = Machine(folder, libraries, gpus)
        programs = {job.folder for job in jobs if job.is_program}
        print(f"{'':22}{'peak':>8}{'reserved':>9}{'ratio':>9}{'lowest':>9}{'next':>9}{'CPU':>10}")
        with (
            Driver(machine, programs, counts_files=chosen.resident) as driver,
            ThreadPoolExecutor(chosen.together) as pool,
        ):
            runs = [pool.submit(run_job, job, machine, driver, folder) for job in jobs]
            rows = []
            for run in as_completed(runs):
                rows.append(run.result())
                print(rows[-1], flush=True)
    sys.exit(not all(row.is_good for row in rows))


if __name__ == "__main__":
    main()
