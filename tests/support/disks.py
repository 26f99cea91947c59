"""Disks in trouble: full, read-only, failing, slow. Most of them need root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHIM = Path(__file__).with_name("troubled_disk.c")


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=2m") -> Iterator[None]:
    """A disk of its own at ``folder``; ``options`` are those of tmpfs: size, nr_inodes."""
    with _mounted(folder, "-t", "tmpfs", "-o", options, "tmpfs"):
        yield


def fill(folder: Path) -> Path:
    """Fill a small disk; return the file that does."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return filler


def use_up_inodes(folder: Path) -> Path:
    """Leave a small disk no file that could still be made; return the folder of those that do."""
    filler = folder / "filler"
    with contextlib.suppress(OSError):
        filler.mkdir()
        for number in range(1_000_000):
            (filler / str(number)).touch()
    return filler


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be opened for writing in ``folder``, as after an error of its file system."""
    with _mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


def troubled_disk(folder: Path, state: Path) -> dict[str, str]:
    """Variables for programs whose disk at ``folder`` has the trouble that ``state`` names."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc)")
    library = state.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(_SHIM), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "TROUBLED_FOLDER": str(folder), "TROUBLE": str(state)}


@contextlib.contextmanager
def _mounted(folder: Path, *what: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", *what, str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
