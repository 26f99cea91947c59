"""Disks that are full, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=2m") -> Iterator[None]:
    """A disk of its own at ``folder``; ``options`` are those of tmpfs: size, nr_inodes."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill a small disk; return the file that does."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return filler
