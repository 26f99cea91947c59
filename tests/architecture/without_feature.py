"""Delete a feature from a copy of the project, and check that the rest works without it.

    python tests/architecture/without_feature.py NAME… [--to DIR] [--quick]

NAME is a feature, ``all``, or ``some``: three that the hash of the commit chooses.

The copy differs by the feature's folder, its tests, the lines of ``assembly.py`` that name it, and
what ``just keys`` writes. If another file needed a change, it would not be a feature. ``--to DIR``
leaves the copy there and checks nothing; ``--quick`` leaves out the conformance matrix.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/robust_train")

IMPORT_ALL = """
import importlib, os, pkgutil, robust_train
assert robust_train.__file__.startswith(os.path.realpath(".")), robust_train.__file__
left_out = ("robust_train.vision", "robust_train.project_template", "robust_train.configs")
for module in pkgutil.walk_packages(robust_train.__path__, "robust_train."):
    if module.name.endswith("__main__") or module.name.startswith(left_out):
        continue
    importlib.import_module(module.name)
"""

OUT_OF_MEMORY = """
import sys
from robust_train import AttemptsExhaustedError, launch

def train(cfg, run):
    if run.attempt == 1:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return cfg.training.batch_size

if __name__ == "__main__":
    cfg = {"device": "cpu", "training": {"batch_size": 8}, "min_batch_size": 2}
"""

HALVES = """
    summary = launch(train, cfg, run_dir=sys.argv[1])
    assert summary.status == "completed", summary
    assert [attempt.outcome for attempt in summary.attempts][-1] == "completed", summary
    assert len(summary.attempts) == 2, summary
    assert summary.result == 4, summary
"""

GIVES_UP = """
    try:
        summary = launch(train, cfg, run_dir=sys.argv[1])
    except AttemptsExhaustedError as error:
        assert "cpu at micro-batch 8" in str(error), error
    else:
        raise AssertionError(summary)
"""

TEST = "test_the_same_command_completes_a_troubled_job"
OUT_OF_MEMORY_CELL = "ranks-out of memory"
CELLS = (
    "function-SIGTERM then a new job",
    "function-SIGKILL of process 1",
    OUT_OF_MEMORY_CELL,
    "script-SIGKILL of process 2",
    "lightning-pruned",
    "vision-SIGKILL to all",
)


def features() -> list[str]:
    """Return the names of all features."""
    folders = (ROOT / PACKAGE / "features").iterdir()
    return sorted(folder.name for folder in folders if (folder / "__init__.py").is_file())


def chosen() -> list[str]:
    """Return three features, the same ones for the same commit."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(random.Random(commit).sample(features(), 3))


def features_named(words: Sequence[str]) -> list[str]:
    """Return the features that a command line names."""
    names = []
    for word in words:
        if word == "all":
            names += features()
        elif word == "some":
            names += chosen()
        else:
            names.append(word)
    return names


def copy_project(to: Path, *, leave_out: Sequence[str] = ()) -> None:
    """Copy the project's files, except for these folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in filter(None, listed.stdout.split("\0")):
        if path.startswith(tuple(f"{folder}/" for folder in leave_out)):
            continue
        source = ROOT / path
        if not source.exists() and not source.is_symlink():
            continue  # deleted, and not committed yet
        target = to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def copy_without(name: str, to: Path) -> None:
    """Copy the project's files, without a feature."""
    if name not in features():
        raise SystemExit(f"{name}: there is no such feature; there are {', '.join(features())}")
    copy_project(to, leave_out=[str(PACKAGE / "features" / name), f"tests/features/{name}"])
    assembly = to / PACKAGE / "assembly.py"
    lines = assembly.read_text().splitlines(keepends=True)
    names_it = re.compile(rf"\bfeatures\.{name}\b")
    assembly.write_text("".join(line for line in lines if not names_it.search(line)))


def check(name: str, folder: Path, *, quick: bool) -> None:
    """Raise CalledProcessError if the project in ``folder`` does not work without a feature.

    If memory runs out, a job continues with half the batch; without that very feature it gives up.
    """
    has_remedy = name != "out_of_memory"
    paths = [str(folder / "src"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def run(*words: str) -> None:
        print("+", *words[:4], flush=True)
        subprocess.run([sys.executable, *words], cwd=folder, env=environ, check=True)

    script = folder / "out_of_memory.py"
    script.write_text(OUT_OF_MEMORY + (HALVES if has_remedy else GIVES_UP))
    run("-c", IMPORT_ALL)
    run("-c", "from importlinter.cli import lint_imports_command as lint; lint()")
    run("tests/support/keys.py")
    with tempfile.TemporaryDirectory() as run_dir:
        run(str(script), run_dir)
    if not quick:
        cells = [cell for cell in CELLS if has_remedy or cell != OUT_OF_MEMORY_CELL]
        ids = [f"tests/conformance/test_conformance.py::{TEST}[{cell}]" for cell in cells]
        run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "-m", "", *ids)


def main() -> None:
    """Delete one feature, or all of them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="+", help=f"of {', '.join(features())}; all; or some")
    parser.add_argument("--to", type=Path, help="leave the copy here, and check nothing")
    parser.add_argument("--quick", action="store_true", help="run no conformance cells")
    given = parser.parse_args()
    names = features_named(given.name)
    if given.to is not None:
        (name,) = names
        copy_without(name, given.to)
        return
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(f"without {name}:", flush=True)
            copy_without(name, Path(folder))
            try:
                check(name, Path(folder), quick=given.quick)
            except subprocess.CalledProcessError as error:
                failed.append(name)
                print(f"{name}: {error.cmd[1:3]} fails", flush=True)
    if failed:
        sys.exit(f"not deletable: {', '.join(failed)}")
    print(f"deletable: {', '.join(names)}")


if __name__ == "__main__":
    main()
