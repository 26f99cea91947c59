"""A real limit on the private writable memory of this process, by ``RLIMIT_DATA``."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20


def data_bytes() -> int:
    """Return what the limit is on."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def limit_growth(growth_bytes: int) -> None:
    """Let this process's memory grow by so much and no more."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + growth_bytes, hard))


def lift_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextlib.contextmanager
def limited_growth(growth_bytes: int) -> Iterator[None]:
    limit_growth(growth_bytes)
    try:
        yield
    finally:
        lift_limit()
