"""``robust-train doctor --probe``: use a GPU for some seconds, run out of memory, recover.

:func:`probe` reserves a GPU and starts this file in a process of its own, with an end;
:func:`exercise` is what that process does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from robust_train.gpu.bounded import NoAnswer, run_command
from robust_train.gpu.inventory import read_inventory
from robust_train.gpu.visible import VARIABLE, visible_gpus
from robust_train.model.events import Json
from robust_train.model.gpu import GpuInfo
from robust_train.queue.host_queue import HostQueue
from robust_train.queue.waiting import GpuRequest, NoGpu
from robust_train.readable import GIB

if TYPE_CHECKING:
    import torch

_LIMIT_SECONDS = 90.0
_NEED_BYTES = 2 * GIB
_PARTS = 8


def probe(gpu: GpuInfo, queue_directory: Path | None) -> tuple[bool, str]:
    """Probe a usable GPU that no job has; return whether it passed, and one line about it. Without
    a ``queue_directory`` nothing is reserved."""
    queue = HostQueue(
        queue_directory,
        name="doctor --probe",
        run_dir=os.getcwd(),
        jobs_per_device=1,
        read=lambda processes: visible_gpus(
            read_inventory(processes=processes), os.environ
        ),
    )
    request = GpuRequest(_NEED_BYTES, wait=False, only=frozenset({gpu.uuid}))
    try:
        found = queue.wait(request)
        if isinstance(found, NoGpu):
            return True, f"not probed: {found.reason}"
        return _in_a_process(gpu.uuid)
    finally:
        queue.release()


def _in_a_process(uuid: str) -> tuple[bool, str]:
    environ = {**os.environ, VARIABLE: uuid}
    try:
        done = run_command([sys.executable, "-m", __name__], _LIMIT_SECONDS, environ)
    except (OSError, NoAnswer) as error:
        return False, str(error)
    printed = done.stdout if done.returncode == 0 else done.stderr
    lines = printed.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    if done.returncode != 0:
        return False, last
    seen = json.loads(last)
    return seen["left_bytes"] == 0, (
        f"computed, ran out of memory and went on with 1/{seen['parts']:g} of it in "
        f"{seen['seconds']:.1f} s, {seen['left_bytes']} bytes left"
    )


def exercise(device: torch.device, free_bytes: int) -> dict[str, Json]:
    """Compute on a device, ask for twice the memory that is free there, and go on with less. Raises
    RuntimeError: a result is wrong, or memory never ran out."""
    import torch

    from robust_train.step.oom_handler import adaptive_batch_training

    started = time.monotonic()
    ones = torch.ones(512, 512, device=device)
    if not torch.equal((ones @ ones).cpu(), torch.full((512, 512), 512.0)):
        raise RuntimeError("a product of matrices is wrong")
    calls = 0

    def use(batch_size: int) -> int:
        nonlocal calls
        calls += 1
        block = torch.empty(
            batch_size * (free_bytes // _PARTS), dtype=torch.uint8, device=device
        )
        block[:: 1 << 20].fill_(1)
        if int(block[-1 - (len(block) - 1) % (1 << 20)]) != 1:
            raise RuntimeError("memory does not hold what was written")
        return batch_size

    size = adaptive_batch_training(use, initial_batch_size=2 * _PARTS, min_batch_size=1)
    if calls == 1:
        raise RuntimeError("twice the memory was allocated")
    left = 0
    if device.type == "cuda":
        del ones
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(device)
    return {
        "parts": _PARTS / size,
        "left_bytes": left,
        "seconds": time.monotonic() - started,
    }


def _main() -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "torch finds no GPU: its build has no CUDA, or the driver is too old for it"
        )
    device = torch.device("cuda", 0)
    # others may be on it too
    print(json.dumps(exercise(device, torch.cuda.mem_get_info(device)[0])))


if __name__ == "__main__":
    _main()
