"""Make the pictures of README from a real run: python docs/images/make.py (needs Chromium).

The run trains the built-in model on the CPU, on a terminal, under a real limit of memory
(RLIMIT_DATA) that half of the batch fits into and the whole does not.
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
sys.path.insert(0, str(ROOT / "tests"))

from terminal_screen import lines_shown, run_on_a_terminal  # noqa: E402

JOB = ("model.width=64", "training.batch_size=512", "training.epochs=12")
COLUMNS = 100
_REDRAWN = "\r\x1b[2K"
_LEFT_OUT = re.compile(r"NVIDIA driver|^[\w ,.-]*GPU access|mixed_precision|oneDNN")


def run(folder: Path, limit_mib: int) -> str:
    """Return what the job writes to its terminal within the limit, empty if it fails."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
    environ |= {"XDG_CACHE_HOME": str(folder.parents[1] / "cache"), "TERM": "xterm"}
    command = [sys.executable, str(ROOT / "train_robust.py"), *JOB, f"hydra.run.dir={folder}"]
    code, written = run_on_a_terminal(command, COLUMNS, 30, environ, preexec_fn=limited)
    return written.decode(errors="replace") if code == 0 else ""


def picture(path: Path, written: str, scratch: str) -> None:
    """Draw what a terminal shows after all of that."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(f"$ python train_robust.py {' '.join(JOB)}", style="bold", highlight=False)
    for line in lines_shown(written, COLUMNS):
        if line and not _LEFT_OUT.search(line):
            style = "yellow" if "out of memory" in line else "green" if line[0] in "━─" else ""
            console.print(Text(re.sub(rf"{scratch}/\d+", "outputs", line), style=style))
    console.save_svg(str(path), title="robust-train")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for number, limit_mib in enumerate(range(1100, 500, -50)):
            folder = Path(scratch) / str(number) / "cnn_digits"
            written = run(folder, limit_mib)
            if "the step is repeated" in written and "attempt 2" not in written:
                break
        else:
            sys.exit("no limit at which the job runs out of memory and goes on")
        # a moment after the sixth epoch
        middle = written.index(_REDRAWN, written.index("checkpoint step", written.index("epoch 6")))
        picture(HERE / "training.svg", written[:middle], scratch)
        picture(HERE / "ended.svg", written, scratch)
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
