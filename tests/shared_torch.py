"""Jobs of a test session whose fork servers are forks of one process that has imported torch.

A sweep's jobs get theirs from such a zygote; here the launches of many tests do, since importing
torch is most of what starting one costs. Where a test's environment differs in what torch or the
dynamic linker read, there is another zygote, or none: tests of the start itself start as users do
(``World.alone``).

Run as a script, in place of the one that is named: ``shared_torch.py FD train_robust.py …``.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

_READ_AT_START = ("LD_", "OMP_", "GOMP_", "MALLOC_", "PYTHON", "PYTORCH_", "TORCH", "CUDA_", "MKL_")
_MOST_ZYGOTES = 2

_zygotes: dict[tuple[tuple[str, str], ...], object] = {}


def requests_of(environ: Mapping[str, str]) -> int:
    """The descriptor at which the zygote for this environment takes requests; made at need."""
    from robust_train.execution.fork_server import ForkServer

    key = tuple(sorted((k, v) for k, v in environ.items() if k.startswith(_READ_AT_START)))
    handle = _zygotes.pop(key, None)
    if handle is None or handle.poll() is not None:
        # nothing of the test that comes first: it looks whether it has left anything behind
        of_all = {k: v for k, v in os.environ.items() if k not in environ or environ[k] == v}
        with mock.patch.dict(os.environ, {**of_all, **dict(key)}, clear=True):
            handle = ForkServer().share()
    _zygotes[key] = handle
    if len(_zygotes) > _MOST_ZYGOTES:
        _zygotes.pop(next(iter(_zygotes))).close()
    return handle._requests.fileno()


class _SomebodyElses:
    """The zygote's process, for a launcher that has not started it and must not end it."""

    def poll(self) -> None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


def _main(descriptor: int, script: str) -> None:
    from robust_train.execution import at_hand
    from robust_train.execution.output import OutputPump
    from robust_train.execution.zygote_handle import ZygoteHandle

    os.set_inheritable(descriptor, False)
    requests = socket.socket(fileno=descriptor)
    at_hand._zygote = ZygoteHandle(_SomebodyElses(), requests, OutputPump(), os.environ)
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    number, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    _main(int(number), script)
