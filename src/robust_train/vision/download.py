"""Fetching a published data set once, with a bounded wait and one-line refusals."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from robust_train.errors import ConfigError

# urllib waits for ever by default
_SILENCE_SECONDS = 20.0


def fetch(cfg: Any, *, url: str, is_present: Callable[[], bool], get: Callable[[], None]) -> None:
    """Call ``get`` unless the data is there; only one process of this host at a time does.

    Args:
        cfg: the config group ``dataset``.
        url: where ``get`` fetches from, for messages.
        is_present: whether the data set lies under ``cfg.root``.
        get: downloads it and verifies its checksum.

    Raises:
        ConfigError: it is absent and may not or cannot be fetched.
    """
    if is_present():
        return
    ways_out = "use dataset.root=<folder that has it>"
    if not cfg.download:
        raise ConfigError(
            f"dataset.root={cfg.root}: {cfg.name} is not there and dataset.download=false; "
            f"{ways_out} or dataset.download=true (from {url})"
        )
    try:
        with _alone(Path(cfg.root).expanduser()), _bounded_silence():
            if not is_present():
                get()
    except (OSError, RuntimeError, EOFError) as error:
        # urllib's errors are OSErrors; torchvision reports a wrong checksum as RuntimeError
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise ConfigError(
            f"dataset={cfg.name}: could not be fetched from {url} ({reason.splitlines()[0]}); "
            f"{ways_out}"
        ) from error


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _bounded_silence() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
