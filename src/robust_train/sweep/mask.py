"""The user's CUDA_VISIBLE_DEVICES, past a launcher that puts its own in the jobs' way.

submitit's local executor gives every job a mask made of ``gpus_per_node``: nothing by default, and
the same first GPUs to all where it is set. Nobody has allocated anything to them by that.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping

_VARIABLE = "ROBUST_TRAIN_SWEEP_MASK"
_MASK = "CUDA_VISIBLE_DEVICES"


def remember_mask(environ: MutableMapping[str, str]) -> None:
    """In the process of the sweep: keep what its jobs may see."""
    environ[_VARIABLE] = json.dumps(environ.get(_MASK))


def restore_mask(environ: MutableMapping[str, str]) -> None:
    """In the process of a job: under submitit's local executor put back what was kept."""
    if environ.get("SUBMITIT_EXECUTOR") != "local" or _VARIABLE not in environ:
        return
    mask = json.loads(environ[_VARIABLE])
    if mask is None:
        environ.pop(_MASK, None)
    else:
        environ[_MASK] = mask
