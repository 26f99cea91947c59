"""Make the pictures of README from a real run: python docs/images/make.py (needs Chromium).

The run trains the built-in model on the CPU under a real limit of memory (RLIMIT_DATA) that half of
the batch fits into and the whole does not.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JOB = ("model.width=64", "training.batch_size=512", "training.epochs=12")
SHOWN = 100
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+\](?:\[[\w.]+\])+ - ")
_KEPT = re.compile(r"attempt|out of memory|micro-batch|accuracy|completed|^1 ")


def run(folder: Path, limit_mib: int) -> str:
    """Return what the job prints within the limit, empty if it fails."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
    environ |= {"XDG_CACHE_HOME": str(folder.parents[1] / "cache")}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train_robust.py"), *JOB, f"hydra.run.dir={folder}"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limited,
        check=False,
    )
    return ended.stdout if ended.returncode == 0 else ""


def lines_of(printed: str) -> list[str]:
    """Return the lines that tell the story, with a short time."""
    lines = [_STAMP.sub(r"\1 ", line) for line in printed.splitlines()]
    return [line for line in lines if _KEPT.search(line)]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for number, limit_mib in enumerate(range(1100, 500, -50)):
            folder = Path(scratch) / str(number) / "cnn_digits"
            shown = run(folder, limit_mib)
            if "the step is repeated" in shown and "attempt 2" not in shown:
                break
        else:
            sys.exit("no limit at which the job runs out of memory and goes on")
        console = Console(record=True, width=SHOWN, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(f"$ python train_robust.py {' '.join(JOB)}", style="bold", highlight=False)
        for line in lines_of(shown):
            style = "yellow" if "out of memory" in line else ""
            console.print(Text(line.replace(scratch, "outputs"), style=style, overflow="fold"))
        console.save_svg(str(HERE / "terminal.svg"), title="robust-train")
        subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--window-size=1000,1400", f"--user-data-dir={scratch}/browser"),
                *("--disable-background-networking", "--no-first-run", "--disable-sync"),
                f"--screenshot={HERE / 'report.png'}",
                (folder / "report.html").as_uri(),
            ],
            check=True,
        )


if __name__ == "__main__":
    main()
