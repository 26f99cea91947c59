"""Settings of torch's CUDA allocator in the environment, and those that robust-train adds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""Every torch since 2.4 reads it. Torch 2.10 and later read it first, then ``PYTORCH_ALLOC_CONF``.
The first that is set wins."""

_NEWER = "PYTORCH_ALLOC_CONF"


def use_expandable_segments(
    setting: bool | None, environ: Mapping[str, str], *, is_safe: bool = True, gpus: int = 1
) -> bool:
    """Decide whether the allocator uses expandable segments from the start.

    ``setting`` is ``memory.expandable_segments``, None if ``auto``. The user's environment
    overrides it. Expandable segments avoid most fragmentation, but fail at the first allocation
    under WSL2, and break CUDA graphs over NCCL's peer-to-peer transport as well as vLLM's
    all-reduce: so ``auto`` uses them only on a single GPU, for a trainer with which that
    ``is_safe``.
    """
    exported = exported_expandable_segments(environ)
    if exported is not None:
        return exported
    if setting is not None:
        return setting
    return is_safe and gpus == 1 and not is_wsl()


def is_wsl() -> bool:
    """Return whether the kernel is WSL's."""
    return "microsoft" in os.uname().release.lower()


def allocator_settings(environ: Mapping[str, str], *, expandable_segments: bool) -> str:
    """Return the variable's value: what the user exports under either name, then our setting. An
    exported setting of expandable segments stays."""
    exported = _exported(environ)
    if exported_expandable_segments(environ) is not None:
        return exported
    ours = f"expandable_segments:{expandable_segments}"
    return f"{exported},{ours}" if exported else ours


def exported_expandable_segments(environ: Mapping[str, str]) -> bool | None:
    """Return the setting in the user's own environment, None if there is none."""
    match = re.search(r"expandable_segments\s*:\s*(\w+)", _exported(environ))
    return None if match is None else match.group(1).lower() == "true"


def exported_fraction(environ: Mapping[str, str]) -> float:
    """Return the share of a GPU that the user's own environment leaves the allocator (torch 2.9 and
    later), 1 if that sets none: how people share a GPU."""
    match = re.search(r"per_process_memory_fraction\s*:\s*([\d.]+)", _exported(environ))
    return 1.0 if match is None else float(match[1])


def _exported(environ: Mapping[str, str]) -> str:
    return environ.get(VARIABLE) or environ.get(_NEWER) or ""
