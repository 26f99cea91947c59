"""Make the pictures of README and docs from recorded runs: python docs/images/make.py [NAME ...].

- training: the terminal of the built-in trainer on a simulated GPU, which has no room for the whole
  batch. The launcher sees two GPUs by a simulated driver, and the model computes on the host. Needs
  a C compiler.
- report: the report of the built-in trainer on the CPU. Once torch is imported, its memory has a
  real limit (RLIMIT_DATA), which fits half of the batch but not all of it. Needs `just browser`.
- notebook: a job in a notebook. Needs `just browser`, nbconvert and ipykernel.
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
from simulated_nvml import Gpu, Machine, build_libcuda, build_nvml  # noqa: E402
from terminal import run_at_a_terminal  # noqa: E402
from terminal_screen import lines_shown  # noqa: E402

ON_A_GPU = ("training.batch_size=256", "training.epochs=8")
FITS = 128
ON_THE_CPU = ("model.width=64", "training.batch_size=512", "training.epochs=12")
COLUMNS = 116
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


def run(folder: Path, *arguments: str, **environ: str) -> str:
    """Return what a job writes to its terminal, or an empty string if it fails."""
    command = [
        sys.executable,
        str(ROOT / "train_robust.py"),
        *arguments,
        f"hydra.run.dir={folder}",
        "job_name=cnn_digits",
    ]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "XDG_CACHE_HOME": str(folder.parents[1] / "cache"),
        "PYTHONPATH": str(ROOT / "tests" / "support"),
        **environ,
    }
    code, written = run_at_a_terminal(command, environ, columns=COLUMNS, lines=30)
    return written if code == 0 else ""


def training(scratch: str) -> None:
    """Draw the terminal of a job on a simulated GPU, a moment after its memory ran out."""
    libraries = Path(scratch) / "libraries"
    build_nvml(libraries)
    build_libcuda(libraries)
    gpus = [Gpu(free_mib=9000), Gpu(free_mib=33000)]
    machine = Machine(Path(scratch), libraries, gpus, cuda=13000)
    written = run(
        Path(scratch) / "outputs" / "cnn_digits",
        *ON_A_GPU,
        f"+fits={FITS}",
        "trainer._target_=limited_trainers.built_in_on_a_simulated_gpu",
        **machine.environ,
    )
    if "the step is repeated" not in written:
        sys.exit("the job did not run out of memory and continue")
    epoch = written.index(" epoch 3", written.index("the step is repeated"))
    middle = written.index(_REDRAWN, written.index("checkpoint step", epoch))
    picture(HERE / "training.svg", written[:middle], scratch)


def picture(path: Path, written: str, scratch: str) -> None:
    """Draw what a terminal shows after this output."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    command = f"$ python train_robust.py {' '.join(ON_A_GPU)}"
    console.print(command, style="bold", highlight=False)
    for line in lines_shown(written, COLUMNS):
        if line and not _LEFT_OUT.search(line):
            style = "yellow" if "out of memory" in line else "green" if line[0] in "━─" else ""
            console.print(Text(line.replace(f"{scratch}/", ""), style=style))
    console.save_svg(str(path), title="robust-train")


def report(scratch: str) -> None:
    """Take the picture of a report whose job ran out of the host's memory."""
    for number, limit_mib in enumerate(range(400, 50, -50)):
        folder = Path(scratch) / str(number) / "cnn_digits"
        written = run(
            folder,
            *ON_THE_CPU,
            "trainer._target_=limited_trainers.built_in",
            MALLOC_MMAP_THRESHOLD_="65536",
            DATA_LIMIT_BYTES=str(limit_mib << 20),
        )
        if "the step is repeated" in written and "attempt 2" not in written:
            page = folder / "report.html"
            page.write_text(page.read_text().replace(str(folder.parent), "/home/me/outputs"))
            photograph(page, "report.png", (1000, 1400))
            photograph(page, "report-top.png", (1000, 800))
            return
    sys.exit("no limit at which the job runs out of memory and continues")


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


PICTURES = {"training": training, "report": report, "notebook": notebook}


def main() -> None:
    real_gpus.hide()
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as scratch:
            PICTURES[name](scratch)


if __name__ == "__main__":
    main()
