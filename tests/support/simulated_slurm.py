"""Slurm's commands on this machine: each node of a job is a few local processes.

``sbatch``, ``srun``, ``scontrol requeue``, ``scancel`` and ``sacct`` do what submitit and a batch
script expect of them (sbatch(1), srun(1), scancel(1)). A controller process for each job runs its
script, and starts it again if it is put back into the queue.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMANDS = "sbatch", "srun", "scontrol", "scancel", "sacct", "controller"
KILL_WAIT_SECONDS = 3.0  # by default 30 in slurm.conf
_STATE = "SIMULATED_SLURM"


class Slurm:
    """An installed Slurm; ``environ`` is what its users need."""

    def __init__(self, folder: Path) -> None:
        commands = folder / "bin"
        commands.mkdir(parents=True)
        for name in COMMANDS:
            path = commands / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
            path.chmod(0o755)
        self.folder = folder
        self.environ = {"PATH": f"{commands}:{os.environ['PATH']}", _STATE: str(folder)}

    def tell(self, *command: str) -> None:
        """Run one of the commands."""
        subprocess.run(command, check=True, env={**os.environ, **self.environ})

    def tasks(self, job: str) -> list[int]:
        """The processes of a job's tasks that run, in order."""
        found = (self.folder / job).glob("task-*")
        return [int(path.read_text()) for path in sorted(found)]

    @property
    def jobs(self) -> dict[str, str]:
        """Each job's state."""
        return {path.parent.name: path.read_text() for path in self.folder.glob("*/state")}

    def end(self) -> None:
        """Kill what is left."""
        for path in self.folder.glob("1*/controller"):
            with contextlib.suppress(psutil.Error):
                _kill(psutil.Process(int(path.read_text())))


def _kill(process: psutil.Process) -> None:
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            one.kill()


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options up to the first word that is none, and what follows."""
    found = {}
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).lstrip("-").partition("=")
        if not value and name in ("output", "error", "signal"):
            value = words.pop(0)
        found[name] = value
    return found, words


def sbatch(state: Path, words: list[str]) -> None:
    script = Path(words[-1]).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", script, re.MULTILINE))
    number = str(100 + len(list(state.glob("script-*"))))
    path = state / f"script-{number}"
    path.write_text(script)
    last = re.match(r"0-(\d+)", options.get("array", ""))
    for index in range(int(last.group(1)) + 1 if last else 1):
        job = f"{number}_{index}" if last else number
        folder = state / job
        folder.mkdir()
        (folder / "state").write_text("PENDING")
        nodes, each = int(options["nodes"]), int(options.get("ntasks-per-node", 1))
        environ = {
            "SLURM_JOB_ID": str(int(number) + index),
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS_PER_NODE": str(each),
            "SLURM_NTASKS": str(nodes * each),
            "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        }
        if last:
            environ |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(index)}
        subprocess.Popen(
            ["controller", job, str(path)],
            env={**os.environ, **environ},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=(folder / "batch.log").open("w"),
            stderr=subprocess.STDOUT,
        )
    print(f"Submitted batch job {number}")


def controller(state: Path, words: list[str]) -> None:
    """Run a job's script to its end, and again after each ``scontrol requeue``."""
    job, script = words
    folder, restarts = state / job, 0
    (folder / "controller").write_text(str(os.getpid()))
    while True:
        (folder / "state").write_text("RUNNING")
        environ = {**os.environ, "SIMULATED_SLURM_JOB": job}
        environ |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        batch = subprocess.Popen(["bash", script], env=environ)
        orders = folder / "requeue", folder / "cancel"
        while batch.poll() is None and not any(order.exists() for order in orders):
            time.sleep(0.05)
        requeue, cancel = (order.exists() for order in orders)
        if batch.poll() is None:
            _end(folder, batch)
        for path in folder.glob("task-*"):
            path.unlink()
        if not requeue:
            ended = "CANCELLED" if cancel else "FAILED" if batch.returncode else "COMPLETED"
            (folder / "state").write_text(ended)
            return
        orders[0].unlink()
        restarts += 1
        (folder / "state").write_text("PENDING")


def _end(folder: Path, batch: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all of the job, and SIGKILL to what is still there after a while."""
    _signal(folder, signal.SIGCONT)
    _signal(folder, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        batch.wait(KILL_WAIT_SECONDS)
    for pid in _of_the_tasks(folder):
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
    batch.kill()
    batch.wait()


def _of_the_tasks(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("task-*"):
        with contextlib.suppress(psutil.Error):
            task = psutil.Process(int(path.read_text()))
            found += [task.pid, *(one.pid for one in task.children(recursive=True))]
    return found


def _signal(folder: Path, signum: int) -> None:
    for pid in _of_the_tasks(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def srun(state: Path, words: list[str]) -> int:
    """Start a task for each node and slot; return the highest exit code."""
    options, command = _options(words)
    nodes, count = (int(os.environ[name]) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
    tasks = []
    for number in range(count):
        ids = {
            "%j": os.environ["SLURM_JOB_ID"],
            "%t": str(number),
            "%A": os.environ.get("SLURM_ARRAY_JOB_ID", ""),
            "%a": os.environ.get("SLURM_ARRAY_TASK_ID", ""),
        }
        paths = [
            re.sub("%[jtAa]", lambda found, ids=ids: ids[found[0]], options[name])
            for name in ("output", "error")
        ]
        Path(paths[0]).parent.mkdir(parents=True, exist_ok=True)
        node, local = divmod(number, count // nodes)
        environ = {
            **os.environ,
            "SLURM_PROCID": str(number),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURMD_NODENAME": f"node{node}",
        }
        with open(paths[0], "a") as out, open(paths[1], "a") as err:
            task = subprocess.Popen(
                command, env=environ, stdout=out, stderr=err, start_new_session=True
            )
        (state / os.environ["SIMULATED_SLURM_JOB"] / f"task-{number}").write_text(str(task.pid))
        tasks.append(task)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(state: Path, words: list[str]) -> None:
    assert words[0] == "requeue"
    (state / words[1] / "requeue").touch()


def scancel(state: Path, words: list[str]) -> None:
    job = next(word for word in words if word[0].isdigit())
    options, _ = _options([word for word in words if word != job])
    if "signal" in options:
        _signal(state / job, getattr(signal, f"SIG{options['signal'].removeprefix('SIG')}"))
    else:
        (state / job / "cancel").touch()


def sacct(state: Path, words: list[str]) -> None:
    asked = {word for word in words if word.isdigit()}
    print("JobID|State|NodeList")
    for path in sorted(state.glob("*/state")):
        if path.parent.name.partition("_")[0] in asked:
            print(f"{path.parent.name}|{path.read_text()}|node0")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs inherit nothing of the command's shell
    _, command, *words = sys.argv
    sys.exit(globals()[command](Path(os.environ[_STATE]), words))
