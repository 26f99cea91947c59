"""The environment of an attempt: which GPU it sees, and how CUDA's allocator is set up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from robust_train.types import GpuInfo

_NEW_NAME, _OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def attempt_environment(
    environ: Mapping[str, str], gpu: GpuInfo | None, *, expandable_segments: bool
) -> dict[str, str]:
    """The launcher's environment with the attempt's own settings.

    The attempt sees one GPU, named by UUID because indices depend on who counts, or none.

    Args:
        environ: the launcher's environment.
        gpu: the GPU of the attempt, None for the CPU.
        expandable_segments: wish for the allocator; what the user has exported goes before it.
    """
    own = {
        **environ,
        "CUDA_VISIBLE_DEVICES": "" if gpu is None else gpu.uuid,
        # so that a program that prints or parses indices agrees with nvidia-smi
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    name = allocator_variable(environ)
    settings = environ.get(name, "")
    if exported_expandable_segments(environ) is None:
        # torch parses the variable as a whole, so the wish joins what is there already
        wish = f"expandable_segments:{expandable_segments}"
        own[name] = f"{settings},{wish}" if settings else wish
    return own


def shared_machine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that will import torch on a machine with other jobs.

    Threads of a parallel region that wait for each other spin by default; where other jobs want the
    same cores, the one they wait for does not get one meanwhile. Not to spin at all costs a system
    call for each of the many short regions of a small network, so GNU's OpenMP, which torch's
    wheels bring along, spins for a thousand rounds; others know only the standard's word. OpenMP
    reads this when its library is loaded, and what the user has exported goes before it.
    """
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return dict(environ)
    return {**environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def exported_expandable_segments(environ: Mapping[str, str]) -> bool | None:
    """What the user's own environment says of expandable segments, None if nothing."""
    found = re.search(
        r"expandable_segments\s*:\s*(\w+)", environ.get(allocator_variable(environ), "")
    )
    return None if found is None else found.group(1).lower() == "true"


def allocator_variable(environ: Mapping[str, str]) -> str:
    """The variable that the installed torch reads its allocator settings from.

    Torch 2.10 and later read ``PYTORCH_ALLOC_CONF`` first and the old name if that is not set.
    """
    if not _torch_reads_new_name():
        return _OLD_NAME
    return _OLD_NAME if _OLD_NAME in environ and _NEW_NAME not in environ else _NEW_NAME


def _torch_reads_new_name() -> bool:
    try:
        major, minor = metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) >= (2, 10)
    except (metadata.PackageNotFoundError, ValueError):
        return True
