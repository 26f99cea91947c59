"""Requirements of every command, checked before psutil is imported, which has them too."""

from __future__ import annotations

import errno
import os
import resource

from robust_train.model.errors import ConfigError, find_limit_error

_LEAST_FILES = 24


def why_unusable() -> ConfigError | None:
    """Return what this process lacks that every command needs, or None for nothing."""
    if not os.path.exists("/proc/self/stat"):
        return ConfigError("/proc is not mounted here: mount -t proc proc /proc")
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return find_limit_error(OSError(errno.EMFILE, "")) if most < _LEAST_FILES else None
