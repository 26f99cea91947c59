"""A world for sweeps: one folder for the sweep, one where its jobs meet."""

import contextlib
import json
import subprocess
from typing import Any

import psutil

from world import SUPPORT, Ended, World


class SweepWorld:
    """Runs ``train_robust.py -m`` with one of :mod:`sweep_trainers`. ``folder`` is the sweep's,
    ``place`` where its jobs leave marks for one another and for the test."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.folder = world.folder / "sweep"
        self.place = world.folder / "place"
        self.place.mkdir()
        world.environ["SWEEP_PLACE"] = str(self.place)
        world.environ["PYTHONPATH"] += f":{SUPPORT / 'sweeper_plugin'}"

    def arguments(self, trainer: str, *more: str, n_jobs: int | None = 2) -> list[str]:
        """The arguments of a sweep under our launcher.

        ``trainer`` is one of :mod:`sweep_trainers`, or a dotted path.
        """
        target = trainer if "." in trainer else f"sweep_trainers.{trainer}"
        at_once = [] if n_jobs is None else [f"hydra.launcher.n_jobs={n_jobs}"]
        has_another = any(argument.startswith("hydra/launcher=") for argument in more)
        ours = [] if has_another else ["hydra/launcher=gpu_queue", *at_once]
        common = ["-m", f"trainer._target_={target}", f"hydra.sweep.dir={self.folder}"]
        return [*common, "isolation=none", *ours, *more]

    def sweep(self, trainer: str, *more: str, n_jobs: int | None = 2, **options: Any) -> Ended:
        return self.world.run(*self.arguments(trainer, *more, n_jobs=n_jobs), **options)

    def start(self, trainer, *more, n_jobs=2, **options) -> subprocess.Popen[str]:
        return self.world.start(*self.arguments(trainer, *more, n_jobs=n_jobs), **options)

    def end(self, process: subprocess.Popen[str]) -> Ended:
        return self.world.end(process)

    @property
    def table(self) -> dict[str, Any]:
        return json.loads((self.folder / "sweep.json").read_text())

    @property
    def jobs(self) -> list[dict[str, Any]]:
        return self.table["jobs"]

    def column(self, name: str) -> list[Any]:
        return [job[name] for job in self.jobs]

    def summary(self, number: int) -> dict[str, Any]:
        return json.loads((self.folder / str(number) / "summary.json").read_text())

    def pid_at_work(self, number: int) -> int | None:
        """The process of a trainer that said it is at work."""
        mark = self.place / f"working-{number}"
        text = mark.read_text() if mark.exists() else ""
        return int(text) if text else None

    @property
    def ran(self) -> list[str]:
        """The numbers of the jobs whose trainer ran, in order."""
        mark = self.place / "ran"
        return mark.read_text().split() if mark.exists() else []

    def returned(self) -> list[str]:
        """What the sweeper got, where :data:`RECORDING` was among the arguments."""
        return json.loads((self.world.folder / "returned.json").read_text())


RECORDING = "hydra.sweeper._target_=hydra_plugins.recording_sweeper.RecordingSweeper"


def processes_mentioning(text: str) -> list[psutil.Process]:
    """Processes that run and whose environment or command line contains ``text``."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            about = f"{process.environ()} {process.cmdline()}"
            if text in about and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes
