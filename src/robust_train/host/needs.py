"""Checks that this process can run any command at all. Every command calls it first, before it
imports psutil, which would fail with a traceback."""

from __future__ import annotations

import errno
import os
import resource

from robust_train.model.errors import ConfigError, find_limit_error

# Open files that the smallest command needs.
_LEAST_FILES = 24


def find_missing_requirement() -> ConfigError | None:
    """Return the error for a requirement that this process does not meet, or None."""
    if not os.path.exists("/proc/self/stat"):
        return ConfigError("/proc is not mounted here: mount -t proc proc /proc")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _LEAST_FILES:
        return find_limit_error(OSError(errno.EMFILE, ""))
    return None
