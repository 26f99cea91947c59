"""The variable that CUDA's caching allocator is set up by, and what is wished for in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

_NEW_NAME, _OLD_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def allocator_variable(environ: Mapping[str, str]) -> str:
    """The variable that the installed torch reads its allocator settings from.

    Torch 2.10 and later read ``PYTORCH_ALLOC_CONF`` first and the old name if that is not set.
    """
    if not _torch_reads_new_name():
        return _OLD_NAME
    return _OLD_NAME if _OLD_NAME in environ and _NEW_NAME not in environ else _NEW_NAME


def allocator_settings(environ: Mapping[str, str], *, expandable_segments: bool) -> str:
    """The variable's value with a wish about expandable segments in it.

    Torch parses the variable as a whole, so the wish joins what is there already; what the
    environment says of expandable segments goes before it.
    """
    settings = environ.get(allocator_variable(environ), "")
    if exported_expandable_segments(environ) is not None:
        return settings
    wish = f"expandable_segments:{expandable_segments}"
    return f"{settings},{wish}" if settings else wish


def exported_expandable_segments(environ: Mapping[str, str]) -> bool | None:
    """What the user's own environment says of expandable segments, None if nothing."""
    found = re.search(
        r"expandable_segments\s*:\s*(\w+)", environ.get(allocator_variable(environ), "")
    )
    return None if found is None else found.group(1).lower() == "true"


def _torch_reads_new_name() -> bool:
    try:
        major, minor = metadata.version("torch").split(".")[:2]
        return (int(major), int(minor)) >= (2, 10)
    except (metadata.PackageNotFoundError, ValueError):
        return True
