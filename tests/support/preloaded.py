"""Programs in processes of their own that begin with torch and the built-in trainer imported.

They are forks of one server (see :mod:`warm`), which saves each of them the seconds that these
imports take.
"""

import os
import subprocess
import sys

import warm


def run(
    program, *arguments, cwd=None, environ=None, timeout_seconds=90
) -> subprocess.CompletedProcess[str]:
    """What ``python -c program arguments…`` does, in this process's environment or in ``environ``.

    Freed blocks of memory go back to the system at once, so that a limit is one on what is held and
    not on what a heap with holes has kept.
    """
    if environ is None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ = {**environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return warm.run(("-c", program, *arguments), environ, cwd, timeout_seconds, kind="vision")
