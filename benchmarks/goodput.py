"""Useful time ÷ wall time of a job whose training process is killed at random.

    python benchmarks/goodput.py [--every 60 20 10] [--minutes 10] [--megabytes 40] [--target all]

Three contestants with the same trainer, steps of 50 ms: ours with default settings, and
``torchrun --max-restarts`` with its own checkpoints every five minutes and every ten seconds. The
times between kills are exponentially distributed and the same for all contestants. ``--target
trainer`` (the default) kills the training process, ``all`` every process of the job; a command that
has ended is started again at once. Useful are the steps that the job has got to at the end.
Goal: ours ahead at each rate, and 0.95, 0.92, 0.85 at 60 s, 20 s, 10 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from goodput_trainer import STEP_SECONDS

HERE = Path(__file__).resolve().parent
# a contestant that has made none by then is broken
FIRST_STEP_SECONDS = 60.0


def command(contestant: str, folder: Path, megabytes: int) -> list[str]:
    """Return the command line of one contestant."""
    if contestant == "ours":
        overrides = [
            "trainer._target_=goodput_trainer.train",
            "device=cpu",
            f"+megabytes={megabytes}",
            f"hydra.run.dir={folder / 'run'}",
        ]
        return [sys.executable, str(HERE.parent / "train_robust.py"), *overrides]
    every = contestant.removeprefix("torchrun ").removesuffix(" s")
    arguments = ["--max-restarts", "1000000", "--nproc-per-node", "1", "--standalone"]
    script = str(HERE / "goodput_trainer.py")
    own = [script, str(folder), every, str(megabytes)]
    return [sys.executable, "-m", "torch.distributed.run", *arguments, *own]


def number_in(path: Path) -> int:
    """Return the number in a file, 0 where there is none yet."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def kill(process: subprocess.Popen[bytes], folder: Path, target: str) -> None:
    """Kill the training process, or every process of the job."""
    with contextlib.suppress(ProcessLookupError):
        pid = number_in(folder / "pid")
        if pid:
            os.kill(pid, signal.SIGKILL)
    if target == "all":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def goodput(contestant: str, every: float, seconds: float, megabytes: int, target: str) -> float:
    """Run one contestant for so many seconds, or up to its first step; useful ÷ wall time."""
    rng = random.Random(every)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent / 'src'}"}
        log = (folder / "log").open("ab")

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command(contestant, folder, megabytes),
                cwd=folder,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

        began = time.monotonic()
        process, kill_at = start(), began + rng.expovariate(1 / every)
        while (now := time.monotonic()) < began + seconds or not number_in(folder / "step"):
            if now >= began + max(seconds, FIRST_STEP_SECONDS):
                kill(process, folder, "all")
                sys.exit(f"{contestant} has not made a step:\n{(folder / 'log').read_text()}")
            if now >= kill_at:
                kill(process, folder, target)
                kill_at += rng.expovariate(1 / every)
            if process.poll() is not None:
                process = start()
            time.sleep(0.02)
        useful = STEP_SECONDS * number_in(folder / "step") / (now - began)
        kill(process, folder, "all")
        process.wait()
        time.sleep(1)  # what was left of the job sees that its launcher has gone
        return useful


def main() -> None:
    """Print one line for each contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=float, nargs="+", default=[60, 20, 10])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--target", choices=("trainer", "all"), default="trainer")
    chosen = parser.parse_args()
    print(f"{'killed every':<16}" + "".join(f"{every:>8g} s" for every in chosen.every))
    for contestant in ("ours", "torchrun 300 s", "torchrun 10 s"):
        shares = [
            goodput(contestant, every, 60 * chosen.minutes, chosen.megabytes, chosen.target)
            for every in chosen.every
        ]
        print(f"{contestant:<16}" + "".join(f"{share:>10.2f}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
