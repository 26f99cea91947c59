"""Programs in processes of their own that begin with torch and the built-in trainer imported.

They are forks of one server, which saves each of them the seconds that these imports take.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch._dynamo", "robust_train.vision.trainer"])


def run(
    program: str,
    *arguments: str,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = 200,
) -> subprocess.CompletedProcess[str]:
    """What ``python -c program arguments…`` does, in this process's environment or in ``environ``.

    Freed blocks of memory go back to the system at once, so that a limit is one on what is held and
    not on what a heap with holes has kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        streams = (str(stdout), str(stderr))
        process = _server.Process(
            target=_work, args=(program, arguments, str(cwd or Path.cwd()), environ, streams)
        )
        process.start()
        process.join(timeout_seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(program, timeout_seconds)
        printed = [path.read_text() if path.exists() else "" for path in (stdout, stderr)]
    return subprocess.CompletedProcess(program, process.exitcode, *printed)


def _work(
    program: str,
    arguments: tuple[str, ...],
    cwd: str,
    environ: Mapping[str, str] | None,
    streams: tuple[str, str],
) -> None:
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 65536)
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
