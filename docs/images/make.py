"""Make the pictures of README and docs from real runs: python docs/images/make.py.

Needs `just browser`, nbconvert and ipykernel.

The run trains the built-in model on the CPU, whatever the machine has, on a terminal. Once torch is
imported, its memory has a real limit (RLIMIT_DATA) that half of the batch fits into and the whole
does not.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import real_gpus  # noqa: E402
from browser import Browser, find_browser  # noqa: E402
from terminal import run_at_a_terminal  # noqa: E402
from terminal_screen import lines_shown  # noqa: E402

JOB = ("model.width=64", "training.batch_size=512", "training.epochs=12")
COLUMNS = 100
CELLS = (
    """from robust_train import launch

def train(cfg, run):
    import torch

    model = torch.nn.Linear(64, 10).to(cfg.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 31):
        if cfg.training.batch_size > 64:
            torch.empty(1 << 60)  # more than any machine has
        x = torch.randn(cfg.training.batch_size, 64, device=cfg.device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.progress(step, total_steps=30, loss=loss.item())
    return loss.item()""",
    'summary = launch(train, {"training": {"batch_size": 128}})',
    "summary.status, summary.result",
)
# the status is drawn; the cursor goes back to the output
_REDRAWN = "\x1b8"
_LEFT_OUT = re.compile(r"oneDNN")


def run(folder: Path, limit_mib: int) -> str:
    """Return what the job writes to its terminal within the limit, empty if it fails."""
    support = ROOT / "tests" / "support"
    environ = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "2",
        "XDG_CACHE_HOME": str(folder.parents[1] / "cache"),
        "PYTHONPATH": str(support),
        "DATA_LIMIT_BYTES": str(limit_mib << 20),
    }
    command = [
        sys.executable,
        str(ROOT / "train_robust.py"),
        *JOB,
        f"hydra.run.dir={folder}",
        "trainer._target_=limited_trainers.built_in",
        "job_name=cnn_digits",
    ]
    code, written = run_at_a_terminal(command, environ, columns=COLUMNS, lines=30)
    return written if code == 0 else ""


def picture(path: Path, written: str, scratch: str) -> None:
    """Draw what a terminal shows after all of that."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(f"$ python train_robust.py {' '.join(JOB)}", style="bold", highlight=False)
    for line in lines_shown(written, COLUMNS):
        if line and not _LEFT_OUT.search(line):
            style = "yellow" if "out of memory" in line else "green" if line[0] in "━─" else ""
            console.print(Text(re.sub(rf"{scratch}/\d+", "outputs", line), style=style))
    console.save_svg(str(path), title="robust-train")


def photograph(page: Path, name: str, size: tuple[int, int]) -> None:
    """Save what a browser window of that size shows of a page."""
    program = find_browser()
    if program is None:
        sys.exit("no browser: run just browser")
    with Browser(program) as browser:
        shown = browser.open(page, width=size[0]).screenshot()
    shown.crop((0, 0, *size)).save(HERE / name)


def notebook(scratch: str) -> None:
    """Run a notebook whose trainer runs out of memory once, and take its picture."""
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    page = nbformat.v4.new_notebook(cells=cells)
    ExecutePreprocessor(resources={"metadata": {"path": scratch}}).preprocess(page)
    for output in (output for cell in page.cells for output in cell.get("outputs", ())):
        if "text" in output:
            output["text"] = re.sub(rf"{scratch}/", "", output["text"])
    file = Path(scratch) / "notebook.html"
    file.write_text(HTMLExporter().from_notebook_node(page)[0])
    photograph(file, "notebook.png", (1000, 900))


def main() -> None:
    real_gpus.hide()
    with tempfile.TemporaryDirectory() as scratch:
        for number, limit_mib in enumerate(range(400, 50, -50)):
            folder = Path(scratch) / str(number) / "cnn_digits"
            written = run(folder, limit_mib)
            if "the step is repeated" in written and "attempt 2" not in written:
                break
        else:
            sys.exit("no limit at which the job runs out of memory and goes on")
        # a moment after the epoch in which memory ran out
        epoch = written.index(" epoch ", written.index("the step is repeated"))
        middle = written.index(_REDRAWN, written.index("checkpoint step", epoch))
        picture(HERE / "training.svg", written[:middle], scratch)
        picture(HERE / "ended.svg", written, scratch)
        photograph(folder / "report.html", "report.png", (1000, 1400))
        notebook(scratch)


if __name__ == "__main__":
    main()
