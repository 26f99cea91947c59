"""The environment variable that sets up torch's CUDA allocator: the user's settings and ours.

The launcher decides about expandable segments and sets the variable for each attempt, before the
attempt imports torch. Attempts and the ``memory`` command read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""Every torch since 2.4 reads this variable. Torch 2.10 and later read ``PYTORCH_ALLOC_CONF`` if it
is not set."""

_NEWER = "PYTORCH_ALLOC_CONF"


def use_expandable_segments(
    setting: bool | None, environ: Mapping[str, str], *, is_safe: bool = True, gpus: int = 1
) -> bool:
    """Decide whether the allocator uses expandable segments from the start.

    Expandable segments avoid most fragmentation. But they fail at the first allocation under WSL2,
    and they break CUDA graphs over NCCL's peer-to-peer transport and vLLM's all-reduce. So
    ``auto`` uses them only on a single GPU.

    Args:
        setting: ``memory.expandable_segments``, None if ``auto``.
        environ: the user's environment, whose setting takes precedence.
        is_safe: whether the trainer's libraries work with expandable segments.
        gpus: number of GPUs of the attempt.
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
    """Return the variable's value: the settings that the user exports under either name, then ours.
    An exported setting of expandable segments stays."""
    exported = _exported_settings(environ)
    if exported_expandable_segments(environ) is not None:
        return exported
    ours = f"expandable_segments:{expandable_segments}"
    return f"{exported},{ours}" if exported else ours


def exported_expandable_segments(environ: Mapping[str, str]) -> bool | None:
    """Return the user's setting in the environment, or None."""
    match = re.search(r"expandable_segments\s*:\s*(\w+)", _exported_settings(environ))
    return None if match is None else match.group(1).lower() == "true"


def exported_fraction(environ: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that the user's environment allows the allocator, 1 if it
    sets no limit. People who share a GPU set one (torch 2.9 and later)."""
    match = re.search(r"per_process_memory_fraction\s*:\s*([\d.]+)", _exported_settings(environ))
    return 1.0 if match is None else float(match[1])


def _exported_settings(environ: Mapping[str, str]) -> str:
    return environ.get(VARIABLE) or environ.get(_NEWER) or ""
